"""Which matrices of a model have an adapter, by the family's weight table; and what does not go with adapters."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence

from slime.backends.megatron_utils.models import find_weight_map
from slime.backends.megatron_utils.models.rule import WeightMap
from slime.flags.lora import ALL_LINEAR, LoraConfig, lora_config
from slime.utils.errors import ConfigError
from slime.utils.json_file import read_model_type

_LINEAR = re.compile(
    r"(?:decoder\.layers\.\d+\.)?((?:self_attention|mlp)\.(?:\w+\.)*(?:linear_\w+|in_proj|out_proj))\.weight(\d+|\{expert\})?"
)


def is_linear(name: str) -> bool:
    """Return True for the weight of a linear layer of the decoder: a Megatron name, whole or after its layer's."""
    return _LINEAR.fullmatch(name) is not None


def chosen_parts(config: LoraConfig, name: str, hf_names: Sequence[str]) -> list[bool]:
    """Return for each HF tensor that a weight is made of whether it has an adapter.

    Args:
        config: of the run.
        name: Megatron's, of a linear layer.
        hf_names: of the tensors.
    """
    match = _LINEAR.fullmatch(name)
    assert match is not None, name
    return [config.chooses(match[1], hf_name.removesuffix(".weight")) for hf_name in hf_names]


def check_lora_arguments(args: Namespace) -> None:
    """Refuse targets that the family has not, and what changes or rounds the frozen weights.

    Raises:
        ConfigError: with the names that there are, or the flag to drop.
    """
    config = lora_config(args)
    if config is None:
        return
    for name in ("int4_qat", "moe_shared_expert_overlap"):
        if vars(args)[name]:
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --lora-rank {config.rank}; drop one.")
    if args.lora_base_precision is not None and args.fp8:
        raise ConfigError(
            f"--lora-base-precision is {args.lora_base_precision} and --fp8-format {args.fp8}, whose products begin "
            "with weights in bf16; drop one."
        )
    if args.moe_router_enable_expert_bias and args.moe_router_bias_update_rate:
        raise ConfigError(
            f"--moe-router-bias-update-rate is {args.moe_router_bias_update_rate:g}, and --lora-rank {config.rank} "
            "leaves all but the adapters as it is; give 0."
        )
    weight_map = _weight_map(args)
    rules = [rule for rule in weight_map.layer if is_linear(rule.megatron)]
    stacked = [name for rule in rules for name in rule.hf if not name.endswith(".weight") and config.chooses(name)]
    for flag in ("lora_load", "lora_save"):
        if vars(args)[flag] and stacked:
            raise ConfigError(
                f"--{flag.replace('_', '-')}: PEFT's format has no modules for the stacked experts of "
                f"{weight_map.family}; drop the flag, or name other modules (--lora-target-modules)."
            )
    for target in args.lora_target_modules if config.targets != (ALL_LINEAR,) else ():
        one = LoraConfig(rank=1, alpha=1.0, dropout=0.0, targets=(target,))
        if not any(any(chosen_parts(one, rule.megatron, rule.hf)) for rule in rules):
            names = {name.removesuffix(".weight").rpartition(".")[2] for rule in rules for name in rule.hf}
            raise ConfigError(
                f"--lora-target-modules has {target!r}, which no linear layer of {weight_map.family} is called; "
                f"there are {', '.join(sorted(names))}, and all-linear for all of them."
            )


def _weight_map(args: Namespace) -> WeightMap:
    return find_weight_map(args.model_name or read_model_type(args.hf_checkpoint))
