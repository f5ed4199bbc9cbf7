"""MIS as a correction of the policy loss.

    --use-tis
    --custom-config-path examples/train_infer_mismatch_helper/mis.yaml
    --custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp

With ``--get-mismatch-metrics``, and ``use_tis`` and ``use_rs`` set to false in the YAML file, it only measures.  The
formulas are in ``formulas.py``; this module reads the settings, gathers and slices context-parallel responses, and
names the metrics.
"""

from __future__ import annotations

import dataclasses
import difflib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from examples.train_infer_mismatch_helper.formulas import MisConfig, mismatch_importance_sampling
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp
from slime.utils.errors import ConfigError

METRIC_PREFIX = "mis_"
KEYS = tuple(field.name for field in dataclasses.fields(MisConfig))
OF_FLAGS = ("tis_clip", "tis_clip_low")
"""Settings of plain TIS, which share the prefix."""


def config_from_args(args: Namespace) -> MisConfig:
    """Read the settings of mis.yaml, which ``--custom-config-path`` has put into ``args``; missing ones use defaults.

    Raises:
        ConfigError: a value is not allowed, or a key is unknown.
    """
    given = vars(args)
    for name in given:
        if name.startswith(("tis_", "rs_")) and name not in KEYS and name not in OF_FLAGS:
            similar = difflib.get_close_matches(name, KEYS, n=1)
            hint = f"Did you mean {similar[0]}? " if similar else ""
            raise ConfigError(
                f"{name} of --custom-config-path is no setting of MIS. {hint}There are {', '.join(KEYS)}"
            )
    return MisConfig(**{name: given[name] for name in KEYS if given.get(name) is not None})


def compute_mis_weights(
    args: Namespace,
    *,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> tuple[list[Tensor] | None, list[Tensor], dict[str, list[Tensor]]]:
    """Return ``(weights, masks, metrics)`` of whole responses, with one [R] tensor per sample.

    ``weights`` is None without ``use_tis``.
    """
    return mismatch_importance_sampling(train_log_probs, rollout_log_probs, loss_masks, config_from_args(args))


def compute_mis_weights_with_cp(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """The correction, for ``--custom-tis-function-path``; see ``TisFunction`` in slime/flags/hooks.py.

    Args:
        args: Has the settings of mis.yaml.
        pg_loss: Loss of each response token on this rank, samples concatenated.
        train_log_probs: This rank's part of each response.
        rollout_log_probs: This rank's part of each response.
        loss_masks: Masks of whole responses.
        total_lengths: Number of tokens of each sample.
        response_lengths: Number of response tokens of each sample.

    Returns:
        The weighted loss, the masks of whole responses, and per-token metrics on this rank.
    """
    lengths = list(zip(total_lengths, response_lengths, strict=True))

    def whole(column: Sequence[Tensor]) -> list[Tensor]:
        return [all_gather_with_cp(values.detach(), *length) for values, length in zip(column, lengths, strict=True)]

    def of_this_rank(column: Sequence[Tensor]) -> Tensor:
        return torch.cat(
            [slice_log_prob_with_cp(values, *length) for values, length in zip(column, lengths, strict=True)]
        )

    weights, masks, metrics = compute_mis_weights(
        args, train_log_probs=whole(train_log_probs), rollout_log_probs=whole(rollout_log_probs), loss_masks=loss_masks
    )
    if weights is not None:
        pg_loss = pg_loss * of_this_rank(weights)
    return pg_loss, masks, {METRIC_PREFIX + name: of_this_rank(values) for name, values in metrics.items()}
