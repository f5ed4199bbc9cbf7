"""The matrices of a model that have an adapter, by the family's weight table; what does not go with adapters; and the
adapters that engines take (``--lora-push adapter``).
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.models import family_of_folder
from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.rule import WeightMap
from slime.ext.lora.engine_adapters import as_engines_call
from slime.ext.lora.flags import ALL_LINEAR, LoraConfig, engine_adapters, lora_base, lora_config
from slime.ext.lora.peft_folder import TENSOR_FILE, read_peft_config
from slime.flags.config import BackendFlags
from slime.flags.group import flag_of
from slime.train_data.model_dims import ModelDims
from slime.utils.errors import ConfigError, DataError
from slime.weights.stored_tensors import read_header

_LINEAR = re.compile(
    r"(?:decoder\.layers\.\d+\.)?((?:self_attention|mlp)\.(?:\w+\.)*(?:linear_\w+|in_proj|out_proj))\.weight(\d+|\{expert\})?"
)
EXPERT = "experts.{expert}"
# As SGLang 0.5.15.post1 serves them.
_SERVED = frozenset(
    "q_proj k_proj v_proj qkv_proj o_proj gate_proj up_proj gate_up_proj down_proj "
    "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj".split()
)
_JOINED = (
    # Modules that SGLang joins, or whose adapters it applies together, and the end of the name of what they are in.
    ({"q_proj", "k_proj", "v_proj"}, ""),
    ({"q_a_proj", "kv_a_proj_with_mqa"}, ""),
    ({"gate_proj", "up_proj"}, ""),
    ({"gate_proj", "up_proj", "down_proj"}, EXPERT),
)


def has_adapter(weight_map: WeightMap, name: str) -> bool:
    """Return True for the weight of a linear layer of the decoder that is applied to tokens.

    Args:
        weight_map: of the family.
        name: Megatron's, whole or after its layer's.
    """
    return _LINEAR.fullmatch(name) is not None and not name.endswith(weight_map.not_applied)


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


def check_targets(args: Namespace) -> None:
    """Refuse targets that the family has not, what changes or rounds the frozen weights, and first adapters of
    another kind.

    Raises:
        ConfigError: with the names that there are, or the flag to drop.
        DataError: ``--lora-load`` is no whole folder of plain LoRA with this rank and scale.
    """
    config = lora_config(args)
    assert config is not None
    if args.lora_load is not None and args.load == lora_base(args):
        read_peft_config(args.lora_load, flag=f"--lora-load {args.lora_load}", config=config)
        read_header(Path(args.lora_load) / TENSOR_FILE)
    for name in ("int4_qat", "moe_shared_expert_overlap"):
        if vars(args).get(name):
            raise ConfigError(f"{flag_of(name)} does not go with --lora-rank {config.rank}; drop one.")
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
    weight_map = family_of_folder(args.hf_checkpoint, args.model_name).weight_map
    rules = [rule for rule in weight_map.layer if has_adapter(weight_map, rule.megatron)]
    stacked = [name for rule in rules for name in rule.hf if not name.endswith(".weight") and config.chooses(name)]
    for flag in ("lora_load", "lora_save"):
        if vars(args)[flag] and stacked:
            raise ConfigError(
                f"{flag_of(flag)}: PEFT's format has no modules for the stacked experts of "
                f"{weight_map.family}; drop the flag, or name other modules (--lora-target-modules)."
            )
    for target in args.lora_target_modules if config.targets != (ALL_LINEAR,) else ():
        one = LoraConfig(rank=1, alpha=1.0, dropout=0.0, targets=(target,))
        if not any(any(chosen_parts(one, rule.megatron, rule.hf)) for rule in rules):
            names = {name.removesuffix(".weight").rpartition(".")[2] for rule in rules for name in rule.hf}
            raise ConfigError(
                f"--lora-target-modules has {target!r}, which no linear layer that {weight_map.family} applies to "
                f"tokens is called; there are {', '.join(sorted(names))}, and all-linear for all of them."
            )


def engine_settings(args: Namespace) -> dict[str, Any]:
    """Return the fields of ServerArgs with which engines make room for adapters; {} where pushes are merged.

    They have room for the last two pushed, for none, and for those in folders.

    Raises:
        ConfigError: SGLang does not serve adapters on their modules.
        DataError: a folder of ``--lora-engine-adapters`` is not one of plain LoRA.
    """
    config = lora_config(args)
    if config is None or args.lora_push != "adapter":
        return {}
    asked = [("--lora-push adapter", "use --lora-push merged, or other --lora-target-modules", config)]
    for name, folder in engine_adapters(args.lora_engine_adapters).items():
        flag = f"--lora-engine-adapters {name}={folder}"
        content = read_peft_config(folder, flag=flag)
        rank, targets = content.get("r"), content.get("target_modules")
        if type(rank) is not int or not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
            raise DataError(
                f"{flag}: adapter_config.json has r {rank!r} and target_modules {targets!r}; engines want a number "
                "and a list of names."
            )
        asked.append((flag, "leave it out", LoraConfig(rank=rank, alpha=1.0, dropout=0.0, targets=tuple(targets))))
    family, dims = family_of_folder(args.hf_checkpoint, args.model_name), model_dims(args)
    backend = BackendFlags.of(args).sglang_moe_a2a_backend
    modules: set[str] = set()
    for flag, remedy, one in asked:
        modules |= _modules(family, dims, one, backend, flag=flag, remedy=remedy)
    settings = {
        "enable_lora": True,
        "max_lora_rank": max(one.rank for _, _, one in asked),
        "lora_target_modules": sorted(modules),
        "lora_paths": list(args.lora_engine_adapters),
        "max_loras_per_batch": 3 + len(args.lora_engine_adapters),
        "enable_weights_cpu_backup": bool(args.offload_rollout),  # no push brings the base back
    }
    if "gate_proj" in modules:  # a shared expert that is one of the routed ones has no adapter there
        settings["disable_shared_experts_fusion"] = True
    return settings


def _modules(
    family: ModelFamily, dims: ModelDims, config: LoraConfig, moe_backend: str | None, *, flag: str, remedy: str
) -> set[str]:
    """Return the names of the engines' modules on which adapters of ``config`` are."""
    weight_map = family.weight_map
    by_parent: dict[str, set[str]] = {}
    refused: set[str] = set()
    met: set[str] = set()
    for rule in weight_map.layer:
        if not has_adapter(weight_map, rule.megatron) or not _is_there(rule.megatron, dims):
            continue
        for hf_name, is_chosen in zip(rule.hf, chosen_parts(config, rule.megatron, rule.hf), strict=True):
            if not is_chosen:
                continue
            met |= {
                target for target in config.targets if f".{hf_name}".removesuffix(".weight").endswith(f".{target}")
            }
            parent, _, module = hf_name.removesuffix(".weight").rpartition(".")
            module = as_engines_call(module)
            by_parent.setdefault(parent, set()).add(module)
            is_stacked = not hf_name.endswith(".weight")
            is_unserved = module not in _SERVED or module in family.engine_without_adapters
            # Without a latent of queries SGLang takes these for parts of matrices that such a model has not.
            is_misread = rule.megatron.endswith(("linear_q_proj.weight", "linear_kv_down_proj.weight"))
            if is_stacked or is_unserved or (is_misread and dims.q_lora is None):
                refused.add(module)
    if flag.startswith("--lora-engine-adapters"):  # the run's own are known to be there
        refused |= {target for target in config.targets if target not in met}
    if refused:
        raise ConfigError(
            f"{flag}: SGLang serves no adapters on {', '.join(sorted(refused))} of {weight_map.family}; {remedy}."
        )
    for problem in [*_half_joined(by_parent), *_engine_problems(moe_backend, by_parent)]:
        raise ConfigError(f"{flag}: {problem}, or {remedy}.")
    return set().union(*by_parent.values())


def _is_there(name: str, dims: ModelDims) -> bool:
    """Return whether this model has a layer of the family's table: experts, and one of two forms of queries."""
    if "shared_experts" in name:
        return dims.shared_ffn > 0
    if "experts" in name:
        return dims.num_experts > 0
    if "linear_q_proj" in name:
        return dims.q_lora is None
    return dims.q_lora is not None or ("linear_q_down" not in name and "linear_q_up" not in name)


def _half_joined(by_parent: dict[str, set[str]]) -> Iterator[str]:
    for parent, names in by_parent.items():
        for joined, where in _JOINED:
            if names & joined and not joined <= names and parent.endswith(where):
                yield (
                    f"SGLang joins {', '.join(sorted(joined))}, of which --lora-target-modules has "
                    f"{', '.join(sorted(names & joined))} alone; name all"
                )


def _engine_problems(backend: str | None, by_parent: dict[str, set[str]]) -> Iterator[str]:
    if backend not in (None, "none") and any(parent.endswith(EXPERT) for parent in by_parent):
        yield f"--sglang-moe-a2a-backend {backend} applies no adapters of experts; drop it"
