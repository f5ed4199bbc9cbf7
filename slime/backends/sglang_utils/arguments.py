"""The engines' flags: every flag of the installed SGLang and of its router, and the few that slime adds.

``--sglang-X`` sets field X of SGLang's ServerArgs, ``--router-X`` field X of the router's RouterArgs.  Fields that
slime sets itself have no flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
from argparse import Namespace
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.sglang_config import (
    ServerGroupConfig,
    SGLangConfig,
    own_dtype,
    present_name,
    resolve_sglang_config,
    share_problems,
    size_problems,
    trainer_dtype,
)
from slime.flags.checkpoint import check_huggingface_folder
from slime.flags.group import FlagGroup, problems_of
from slime.flags.kinds import (
    INT64_MAX,
    WholeNumber,
    any_float,
    any_int,
    file_path,
    gpu_count,
    home_path,
    json_object,
    named_path,
    non_negative_float,
    port_number,
    positive_int,
)
from slime.flags.parser import Parser
from slime.utils.errors import ConfigError, did_you_mean
from slime.utils.files import language_config, read_model_config
from slime.utils.net import format_host

BLACKWELL, WORKSTATION_BLACKWELL = 10, 12
"""Major compute capabilities."""
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_GPUS = "GPUs of an engine are --rollout-num-gpus-per-engine (times 1 / --sglang-pp-size)"
_NODES = "it follows from --rollout-num-gpus-per-engine and --num-gpus-per-node"
_PLACE = "it follows from the placement of the engines"
SLIME_DECIDES = {
    "model_path": "the engines serve --hf-checkpoint, or what --sglang-config says",
    "config": "a file that lays out engines is --sglang-config",
    "trust_remote_code": "the engines follow --trust-remote-code",
    "random_seed": "the engines' seeds follow from --seed",
    "enable_memory_saver": "it follows from --offload-rollout, which --colocate turns on",
    "tp_size": _GPUS,
    "port": "slime chooses free ports",
    "nccl_port": "slime chooses free ports",
    "nnodes": _NODES,
    "node_rank": _NODES,
    "dist_init_addr": "slime chooses it when the engines start",
    "gpu_id_step": _PLACE,
    "base_gpu_id": _PLACE,
    "skip_server_warmup": "it is always on",
    "enable_return_routed_experts": "it follows from --use-rollout-routing-replay",
}
"""ServerArgs fields without a flag -> what determines them."""
_OTHER_NAMES = {"tp": "tp_size", "tensor_parallel_size": "tp_size", "model": "model_path", "config_file": "config"}
"""Other common names of these fields."""

LONG_NAMES = {
    "sglang_dp_size": "sglang_data_parallel_size",
    "sglang_pp_size": "sglang_pipeline_parallel_size",
    "sglang_ep_size": "sglang_expert_parallel_size",
    "sglang_moe_dp_size": "sglang_moe_data_parallel_size",
}
"""Pairs of attributes of args that are kept equal."""

ROUTER_DEFAULTS = {
    "router_log_level": "warn",
    "router_balance_abs_threshold": 10,
    "router_balance_rel_threshold": 1.2,
    "router_prometheus_host": None,
}
"""Rollouts need load balanced at smaller differences than the router's defaults, a quiet log, metrics on loopback."""


_PATHS = ("path", "paths", "dir", "folder", "file")
"""Last words of the names of SGLang's fields that hold files and folders."""
_COUNT_OR_MINUS_ONE = WholeNumber(high=INT64_MAX, also=-1)


class _Prefixed:
    """A view of a parser that adds a prefix to every flag and attribute added through it."""

    def __init__(self, target: argparse._ActionsContainer, prefix: str, skip: Collection[str] = ()) -> None:
        self._target, self._prefix, self._skip = target, prefix, skip

    def add_argument(self, *names: str, **kwargs: Any) -> None:
        """Add ``--sglang-x-y`` for ``--x-y``, its attribute ``sglang_x_y``."""
        dest = kwargs.pop("dest", None) or names[0].lstrip("-").replace("-", "_")
        if dest in self._skip:
            return
        kwargs["help"] = _escape_percent(kwargs.get("help"))
        if "type" in kwargs:
            kwargs["type"] = _checked_type(dest, kwargs["type"])
        flags = [f"--{self._prefix}{name.lstrip('-')}" for name in names]
        self._target.add_argument(*flags, dest=self._prefix.replace("-", "_") + dest, **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> _Prefixed:
        """Return this view: all groups are flattened into its target."""
        return self


def _checked_type(field_name: str, kind: Any) -> Any:
    """Return the type of an SGLang flag; its numbers must not be negative, except -1 (all, none or automatic)."""
    if kind is json.loads:
        return json_object
    if kind is str and field_name.endswith(_PATHS):
        return named_path if field_name == "lora_paths" else home_path
    if kind is int or kind is float:
        if "priority" in field_name:
            return any_int if kind is int else any_float
        if field_name.endswith("port"):
            return port_number
        return _COUNT_OR_MINUS_ONE if kind is int else non_negative_float
    if getattr(kind, "__name__", "") == "human_readable_int":  # 8k
        return lambda text: _COUNT_OR_MINUS_ONE(str(kind(text)))
    return kind


def _escape_percent(text: str | None) -> str | None:
    """Escape ``%`` in a help text of SGLang for argparse."""
    if text is None or text == argparse.SUPPRESS:
        return text
    return text.replace("%%", "%").replace("%(default)s", "\0").replace("%", "%%").replace("\0", "%(default)s")


def reasons() -> dict[str, str]:
    """Return, for each flag of :data:`SLIME_DECIDES`, what determines its value instead."""
    fields = SLIME_DECIDES | {name: SLIME_DECIDES[field] for name, field in _OTHER_NAMES.items()}
    return {f"--sglang-{name.replace('_', '-')}": instead for name, instead in fields.items()}


def add_sglang_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engines' and the router's flags to ``parser``.

    Raises:
        ConfigError: SGLang or its router is not installed, or does not fit this machine.
    """
    cpu_shim.install()
    try:
        from sglang.srt.server_args import ServerArgs
        from sglang_router.router_args import RouterArgs
    except ImportError as error:
        raise ConfigError(
            f"the flags of the engines come from the installed SGLang, which does not import: {error}; install the "
            "cpu or the gpu extra, or pass --debug-train-only if this run needs no engine"
        ) from error
    engine = parser.add_argument_group("sglang engine", "Fields of the installed SGLang's ServerArgs.")
    ServerArgs.add_cli_args(_Prefixed(engine, "sglang-", SLIME_DECIDES))
    router = parser.add_argument_group("sglang router", "Fields of the installed router's RouterArgs.")
    RouterArgs.add_cli_args(_Prefixed(router, "router-"), use_router_prefix=False, exclude_host_port=True)
    _allow_consistent_hashing(router)
    parser.set_defaults(**ROUTER_DEFAULTS)
    _add_own_flags(parser.add_argument_group("rollout engines", "Number of engines, their layout and their router."))
    _add_old_spellings(parser.add_argument_group("sglang, older spellings"))


def _allow_consistent_hashing(router: argparse._ArgumentGroup) -> None:
    """Allow this policy, which the router supports although its command line does not list it."""
    for action in router._group_actions:
        if action.dest == "router_policy" and action.choices is not None:
            action.choices = [*dict.fromkeys([*action.choices, "consistent_hashing"])]


def _add_own_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sglang-router-ip", help="Address of a router that is already running.")
    group.add_argument(
        "--sglang-router-port", type=port_number, help="Port of the router, whether it is running or to be started."
    )
    group.add_argument(
        "--sglang-router-request-timeout-secs",
        type=positive_int,
        default=14400,
        help="Seconds one generation request may take.",
    )
    group.add_argument("--sglang-server-concurrency", type=int, default=512, help="Most samples in flight per engine.")
    group.add_argument(
        "--prefill-num-servers",
        type=gpu_count,
        help="Separate prefill from decode: this many engines prefill, the others decode.",
    )
    group.add_argument("--sglang-config", type=file_path, help="YAML file with the models and engine groups to start.")


def _add_old_spellings(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sglang-enable-ep-moe",
        action="store_true",
        help="Expert parallelism over the whole engine: sets --sglang-ep-size to the GPUs of an engine.",
    )
    group.add_argument(
        "--sglang-enable-deepep-moe",
        action="store_true",
        help="--sglang-moe-a2a-backend deepep, with expert parallelism over the whole engine.",
    )


def validate_sglang_arguments(args: Namespace) -> None:
    """Derive values from the engines' flags, then check the flags.

    Raises:
        ConfigError: a flag or a combination of flags is invalid.
    """
    check_sglang_arguments(args)
    vars(args).update(derived_sglang_arguments(args))
    _check_layout(args)


def _check_layout(args: Namespace) -> None:
    """Check the engines' layout, as it will be resolved when they start, and the names in its overrides."""
    if args.rollout_external:
        return
    layout = resolve_sglang_config(args)
    # Several groups may break a rule in the same way.
    problems = list(dict.fromkeys([*size_problems(layout), *quantized_problems(layout)]))
    if not args.debug_train_only:
        problems += precision_problems(layout, trainer_dtype(args))
    if args.push_sends_model and not args.debug_rollout_only:
        problems += dict.fromkeys(own_quantization_problems(layout))
        if not args.debug_train_only:
            problems += dict.fromkeys(
                repacking_problems(layout, gpu=_gpu_generation(), can_undo=bool(args.weight_loaders))
            )
    if args.offload_train_if_needed:
        problems += share_problems(layout)
    if args.rollout_top_p != 1.0:
        problems += nuclei_problems(layout, args.rollout_top_p)
    if args.sglang_config is not None:
        from sglang.srt.server_args import ServerArgs

        _check_folders(args.sglang_config, args.hf_checkpoint, layout)
        fields = [field.name for field in dataclasses.fields(ServerArgs)]
        problems += override_problems(args.sglang_config, layout, _engine_parser(), fields)
    if problems:
        raise ConfigError("\n".join(problems))


def nuclei_problems(layout: SGLangConfig, top_p: float) -> Iterator[str]:
    """Yield a message for each setting with which our engines do not return the top-p nuclei that ``top_p`` needs."""
    model = next((model for model in layout.models if model.update_weights), layout.models[0])
    wanted = f"--rollout-top-p {top_p:g} needs the nuclei that the engines draw from"
    if model.has_prefill_decode:
        yield (
            f"{wanted}, and prefill engines do not pass on the first token's; use engines that do both "
            "(no --prefill-num-servers, no prefill and decode groups), or --rollout-top-p 1."
        )
    for group in model.server_groups:
        for name, (fitting, reason) in RETURN_NUCLEI.items():
            if (value := group.setting(name)) not in fitting:
                flag = f"--sglang-{name.replace('_', '-')} is {value}"
                yield f"{wanted}, and {flag}: {reason}, or set --rollout-top-p 1."
                return


RETURN_NUCLEI: dict[str, tuple[tuple[Any, ...], str]] = {
    "speculative_algorithm": ((None, ""), "speculative decoding draws outside the sampler; drop it"),
    "pp_size": ((None, 0, 1), "pipeline stages do not hand them on; set 1"),
    "sampling_backend": (
        (None, "flashinfer", "pytorch"), "only the samplers flashinfer and pytorch can be followed; use one of them"
    ),
}  # fmt: skip
"""Setting of an engine -> the values with which it returns nuclei, and why it does not with others."""


def _check_folders(file: str, hf_checkpoint: str, layout: SGLangConfig) -> None:
    """Check the folder that each model of ``--sglang-config`` serves; SGLang resolves names of the hub."""
    for model in layout.models:
        path = Path(model.model_path)
        is_name = not path.exists() and HUB_NAME.fullmatch(model.model_path)
        if model.model_path != hf_checkpoint and not is_name and not path.is_file():
            check_huggingface_folder(
                model.model_path,
                f"--sglang-config {file}: model_path of {model.name}",
                weights=not any("load_format" in group.overrides for group in model.server_groups),
            )


def read_config(folder: str | None) -> dict[str, Any]:
    """Return config.json of a checkpoint; {} if there is none."""
    has_one = (Path(folder or "") / "config.json").is_file()
    return language_config(read_model_config(folder or "")) if has_one else {}


def derived_sglang_arguments(args: Namespace) -> dict[str, Any]:
    """Return the attributes of ``args`` that follow from the engines' flags."""
    per_engine = args.rollout_num_gpus_per_engine
    derived: dict[str, Any] = {"sglang_tp_size": per_engine // args.sglang_pp_size}
    if args.sglang_enable_ep_moe or args.sglang_enable_deepep_moe:
        derived["sglang_ep_size"] = args.sglang_ep_size if args.sglang_ep_size > 1 else derived["sglang_tp_size"]
    if args.sglang_enable_deepep_moe:
        derived["sglang_moe_a2a_backend"] = "deepep"
    for short, long in LONG_NAMES.items():
        derived[long] = derived.get(short, getattr(args, short))
    if args.sglang_router_ip:
        derived["sglang_router_ip"] = format_host(args.sglang_router_ip)
    return derived


def check_sglang_arguments(args: Namespace) -> None:
    """Raise ConfigError for the first rule that the engines' flags break; change nothing."""
    per_engine, pp_size, dp_size = args.rollout_num_gpus_per_engine, args.sglang_pp_size, args.sglang_dp_size
    for flag, value in (
        ("--rollout-num-gpus-per-engine", per_engine),
        ("--sglang-pp-size", pp_size),
        ("--sglang-dp-size", dp_size),
        ("--sglang-server-concurrency", args.sglang_server_concurrency),
    ):
        if value is None or value < 1:
            raise ConfigError(f"{flag} is {value}; it must be 1 or more.")
    if per_engine % pp_size:
        raise ConfigError(
            f"--rollout-num-gpus-per-engine is {per_engine} and --sglang-pp-size {pp_size}: the GPUs of an engine "
            "must divide into its pipeline stages. Change one of the two."
        )
    if dp_size > 1 and not args.sglang_enable_dp_attention:
        raise ConfigError(
            f"--sglang-dp-size is {dp_size}: data parallelism inside an engine is that of attention only. Add "
            "--sglang-enable-dp-attention, or run more engines (--rollout-num-gpus-per-engine smaller)."
        )
    if args.router_dp_aware:
        raise ConfigError(
            "--router-dp-aware makes the router list each data-parallel rank as an engine, at an address where none "
            "can be registered or aborted. Drop it: an engine spreads its requests (--sglang-load-balance-method)."
        )
    fraction = args.sglang_mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError(
            f"--sglang-mem-fraction-static is {fraction}; it is the fraction of a GPU's memory for weights and cache, "
            "between 0 and 1, such as 0.7."
        )
    topk, steps = args.sglang_speculative_eagle_topk, args.sglang_speculative_num_steps
    tokens = args.sglang_speculative_num_draft_tokens
    if args.sglang_speculative_algorithm and topk == 1 and steps and tokens and tokens > steps + 1:
        raise ConfigError(
            f"--sglang-speculative-num-draft-tokens is {tokens} with --sglang-speculative-num-steps {steps} and "
            f"--sglang-speculative-eagle-topk 1: one chain of {steps} steps has {steps + 1} tokens at most."
        )
    if problems := problems_of(args, [RULES]):
        raise ConfigError("\n".join(problems))


_DRAFTS = tuple(f"sglang_speculative_{name}" for name in ("num_steps", "num_draft_tokens", "eagle_topk"))
_LAYOUTS = ("sglang_config", "prefill_num_servers", "rollout_external_engine_addrs")
RULES = FlagGroup(
    needs=(
        *((name, "sglang_speculative_algorithm", "EAGLE drafts with the model's own MTP layer") for name in _DRAFTS),
        ("sglang_router_ip", "sglang_router_port", "a router of others has both"),
        ("offload_train_if_needed", "sglang_mem_fraction_static", "it is the engines' share of the memory, as 0.5"),
    ),
    excludes=tuple((*pair, "each lays out the engines alone") for pair in itertools.combinations(_LAYOUTS, 2)),
)


def quantized_problems(layout: SGLangConfig) -> Iterator[str]:
    """Yield a message for each FP8 block size that does not divide an engine's tensor-parallel shards."""
    for model in layout.models:
        config = read_config(model.model_path)
        for group in model.server_groups:
            if group.worker_type not in ("encoder", "placeholder"):
                yield from cut_blocks(model.model_path, group, config, is_of_file=layout.file is not None)


def precision_problems(layout: SGLangConfig, of_trainer: str | None) -> Iterator[str]:
    """Yield a message for each quantized checkpoint whose engines would compute in fp32, which SGLang rejects."""
    for model in layout.models:
        method = (read_config(model.model_path).get("quantization_config") or {}).get("quant_method")
        dtypes = {own_dtype(group.setting("dtype"), of_trainer) for group in model.server_groups}
        if method in ("fp8", "compressed-tensors") and "float32" in dtypes:
            yield (
                f"{model.model_path} is quantized ({method}), and SGLang computes with such weights in bf16 or fp16 "
                "alone; its engines have fp32, the default without CUDA. Give --bf16, or --sglang-dtype bfloat16."
            )


def own_quantization_problems(layout: SGLangConfig) -> Iterator[str]:
    """Yield settings with which engines would quantize pushed weights themselves; pushes then find no parameters."""
    for model in layout.models:
        config = read_config(model.model_path) if model.update_weights else {}
        held = (config.get("quantization_config") or {}).get("quant_method")
        for group in model.server_groups:
            for name in ("quantization", "torchao_config"):
                asked = group.setting(name)
                if model.update_weights and asked and asked != held:
                    yield (
                        f"--sglang-{name.replace('_', '-')} (or the override {name} in --sglang-config) is {asked!r}, "
                        f"and {model.model_path}, which is pushed to, is quantized as {held!r}: an engine that "
                        "quantizes weights by itself has no place for those of a push. Drop it, and give "
                        "--hf-checkpoint a folder in the format (tools/convert_hf_to_fp8.py)."
                    )


def repacking_problems(layout: SGLangConfig, *, gpu: int, can_undo: bool) -> Iterator[str]:
    """Yield settings with which engines would irreversibly repack DeepSeek-V4's published form after loading: FP4
    experts and one-byte scales.

    Args:
        gpu: major compute capability of the engines' GPUs; 0 on a CPU or if unknown.
        can_undo: engines start with loaders that undo Marlin's repacking for a push.
    """
    for model in layout.models:
        has_fp4 = _has_fp4(model.model_path) if model.update_weights else None
        if has_fp4 is None:
            continue
        for group in model.server_groups:
            if group.worker_type in ("encoder", "placeholder"):
                continue
            for name, what, allowed in _repackers(group, gpu, has_fp4=has_fp4, can_undo=can_undo):
                yield (
                    f"{_BACKENDS[name]} (or the override {name} in --sglang-config) is {group.setting(name)!r}, "
                    f"with which SGLang repacks {what} of {model.model_path} after the load: no push finds a place "
                    f"for them. Allowed is {allowed}; or give --hf-checkpoint a folder in bf16 "
                    "(tools/fp8_cast_bf16.py), which tools/convert_hf_to_fp8.py turns into FP8 with scales in fp32."
                )


def _has_fp4(folder: str) -> bool | None:
    """Return True for a folder with FP4 weights, False for one with only one-byte scales, None for any other."""
    quantization = read_config(folder).get("quantization_config") or {}
    if quantization.get("quant_method") != "fp8" or not any(Path(folder).glob("*.safetensors")):
        return None
    from slime.weights.quantize import as_stored, read_format
    from slime.weights.quantize.formats import TwoFormats
    from slime.weights.stored_tensors import stored_codes

    usual = read_format(quantization)
    form = None if usual is None else as_stored(usual, stored_codes(folder))
    return None if form == usual else isinstance(form, TwoFormats)


_BACKENDS = {
    "moe_runner_backend": "--sglang-moe-runner-backend",
    "moe_a2a_backend": "--sglang-moe-a2a-backend",
    "fp8_gemm_runner_backend": "--sglang-fp8-gemm-backend",
}
"""Field of ServerArgs -> its flag."""


def _repackers(group: ServerGroupConfig, gpu: int, *, has_fp4: bool, can_undo: bool) -> Iterator[tuple[str, str, str]]:
    """Yield each setting with which SGLang 0.5.15 repacks something for good: its field, what, the allowed value."""
    runner, exchange, gemm = (group.setting(name) for name in _BACKENDS)
    is_marlin = runner == "marlin" or (runner == "auto" and gpu == WORKSTATION_BLACKWELL)
    if has_fp4 and (runner == "flashinfer_mxfp4" or (is_marlin and not can_undo)):
        yield "moe_runner_backend", "FP4 experts", "marlin with --weight-push verified"
    if has_fp4 and exchange == "megamoe":
        yield "moe_a2a_backend", "FP4 experts", "none"
    if gpu != BLACKWELL:  # on other GPUs DeepGEMM reads the scales as they are
        return
    if gemm in ("auto", "deep_gemm"):
        yield "fp8_gemm_runner_backend", "one-byte scales", "triton"
    if runner == "deep_gemm" or (runner == "auto" and exchange in ("deepep", "mooncake", "nixl")):
        yield "moe_runner_backend", "one-byte scales of experts", "triton"


def _gpu_generation() -> int:
    """Return the major compute capability of this machine's GPUs, assumed equal to the engines'; 0 without GPUs."""
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


def cut_blocks(path: str, group: ServerGroupConfig, config: dict[str, Any], *, is_of_file: bool) -> Iterator[str]:
    """Yield :func:`quantized_problems` of one group; ``config`` is config.json of the checkpoint ``path``."""
    block = (config.get("quantization_config") or {}).get("weight_block_size")
    names = ("pp_size", "ep_size", "moe_dense_tp_size")
    sizes = [group.setting(name) or 0 for name in names]
    if not block or any(not isinstance(size, int) or size < 0 for size in sizes):
        return  # another check reports overrides that are not sizes
    pp_size, ep_size, dense_tp_size = sizes
    num_gpus = group.num_gpus_per_engine
    tp_size = max(1, num_gpus // (pp_size or 1))
    of_experts = (max(1, tp_size // (ep_size or 1)), " or a larger --sglang-ep-size")
    matrices = {"moe_intermediate_size": of_experts}
    if config.get("first_k_dense_replace") or not config.get("moe_intermediate_size"):
        # Mixtral and families with its config keys (MiniMax-M2) have only experts, and one size.
        has_only_experts = config.get("num_local_experts") and not config.get("moe_intermediate_size")
        matrices = {
            "intermediate_size": of_experts if has_only_experts else (dense_tp_size or tp_size, ""),
            **matrices,
        }
    flag = "num_gpus_per_engine of --sglang-config" if is_of_file else "--rollout-num-gpus-per-engine"
    for key, (ranks, more) in matrices.items():
        size = config.get(key)
        if not size:
            continue
        if size % ranks or any(size // ranks % edge for edge in block):
            powers = [2**power for power in range(ranks.bit_length()) if 2**power < ranks]
            fitting = [n for n in powers if size % n == 0 and not any(size // n % edge for edge in block)]
            yield (
                f"The checkpoint {path} has FP8 blocks of {block[0]} x {block[1]} and {key} {size}, which {ranks} "
                f"tensor-parallel ranks of an engine would cut to {size / ranks:g}; SGLang serves whole blocks only. "
                f"Use engines of fewer GPUs ({flag} {max(fitting, default=1) * num_gpus // ranks}){more}, or a bf16 "
                "checkpoint."
            )


def override_problems(path: str, config: SGLangConfig, parser: Parser, fields: Collection[str]) -> Iterator[str]:
    """Yield a message for each override that is not a ServerArgs field, or has a value that its flag would reject."""
    for model in config.models:
        for group in model.server_groups:
            where = f"--sglang-config {path}: the override {{}} of the {group.worker_type} engines of {model.name}"
            for key, value in group.overrides.items():
                name = present_name(key, fields)
                if name not in fields:
                    hint = did_you_mean(name, fields, cutoff=0.75) or " Leave it out."
                    yield f"{where.format(name)} is no field of the installed SGLang's ServerArgs.{hint}"
                elif (action := parser.flag_with(name)) is not None:
                    yield from _value_problems(parser, action, value, where.format(name))


def _value_problems(parser: Parser, action: argparse.Action, value: Any, where: str) -> Iterator[str]:
    """Yield a message for a value that a flag would reject or convert to another value."""
    try:
        read = parser.value_from_file(action, value, where)
    except ConfigError as error:
        yield str(error)
        return
    if isinstance(read, str | int | float | list) and read != value:
        yield f"{where} is {value!r}, which ServerArgs does not convert; write {read!r}."


def _engine_parser() -> Parser:
    """Return a parser of SGLang's own flags, whose names are the fields of ServerArgs."""
    from sglang.srt.server_args import ServerArgs

    parser = Parser(add_help=False)
    ServerArgs.add_cli_args(_Prefixed(parser, ""))
    return parser
