"""Trainer flags whose number must lie in a range, before anything is divided by them."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

from slime.utils.errors import ConfigError


class Range(NamedTuple):
    """``low <= x <= high``, or below ``high`` when ``high_open``."""

    low: float
    high: float = math.inf
    high_open: bool = False

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        return self.low <= value and (value < self.high if self.high_open else value <= self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{self.low:g} or more"
        return f"{self.low:g} or more and {'below' if self.high_open else 'at most'} {self.high:g}"


_COUNT, _NOT_NEGATIVE, _MOMENT, _PROBABILITY = Range(1), Range(0), Range(0, 1, high_open=True), Range(0, 1)

RANGES = {
    "tensor_model_parallel_size": _COUNT,
    "pipeline_model_parallel_size": _COUNT,
    "context_parallel_size": _COUNT,
    "expert_model_parallel_size": _COUNT,
    "expert_tensor_parallel_size": _COUNT,
    "virtual_pipeline_model_parallel_size": _COUNT,
    "num_virtual_stages_per_pipeline_rank": _COUNT,
    "num_layers_per_virtual_pipeline_stage": _COUNT,
    "decoder_first_pipeline_num_layers": _COUNT,
    "decoder_last_pipeline_num_layers": _COUNT,
    "recompute_num_layers": _COUNT,
    "num_query_groups": _COUNT,
    "make_vocab_size_divisible_by": _COUNT,
    "lr_warmup_iters": _NOT_NEGATIVE,
    "lr_warmup_fraction": _MOMENT,
    "lr_decay_iters": _COUNT,
    "min_lr": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _MOMENT,
    "adam_beta2": _MOMENT,
    "adam_eps": _NOT_NEGATIVE,
    "hidden_dropout": _PROBABILITY,
    "optimizer_offload_fraction": _PROBABILITY,
}
"""Attribute of args -> the numbers that it may be; None is always allowed."""


def number_problems(args: Namespace) -> Iterator[str]:
    """One message for each number outside its range."""
    for name, allowed in RANGES.items():
        value = vars(args).get(name)
        if isinstance(value, int | float) and value not in allowed:
            yield f"--{name.replace('_', '-')} is {value}; it must be {allowed}."


def check_numbers(args: Namespace) -> None:
    """Refuse numbers outside their ranges.

    Raises:
        ConfigError: names each of them.
    """
    problems = list(number_problems(args))
    if problems:
        raise ConfigError("\n".join(problems))
