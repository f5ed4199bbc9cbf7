"""The models and engines of a run, from the YAML of ``--sglang-config`` or from flags.  Only data; starts nothing.

sglang:                      # a list of models; each gets its own router
  - name: default
    model_path: /models/x    # default: --hf-checkpoint
    num_gpus_per_engine: 2   # default: --rollout-num-gpus-per-engine
    update_weights: true     # default: whether model_path is --hf-checkpoint
    server_groups:           # equal engines, on consecutive GPUs
      - worker_type: regular # or prefill, decode, encoder, placeholder (GPUs left empty)
        num_gpus: 8
        num_gpus_per_engine: 4
        overrides: {context_length: 8192}    # ServerArgs fields, which take precedence over flags
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime.flags.overlay import read_yaml
from slime.utils.errors import ConfigError
from slime.utils.files import read_model_config

logger = logging.getLogger(__name__)

WORKER_TYPES = ("regular", "prefill", "decode", "encoder", "placeholder")
MODEL_KEYS = frozenset(
    {"name", "model_path", "num_gpus_per_engine", "update_weights", "server_groups", "engine_groups"}
)
EVALUATION_MODEL = "eval"
"""Name of the model whose engines evaluate with ``--eval-in-background``."""
GROUP_KEYS = frozenset({"worker_type", "num_gpus", "num_gpus_per_engine", "overrides"})


@dataclass(frozen=True, kw_only=True)
class ServerGroupConfig:
    """Equal engines on consecutive GPUs."""

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """ServerArgs fields of these engines, which take precedence over flags."""

    of_flags: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """ServerArgs fields from the flags."""

    def setting(self, name: str) -> Any:
        """Return the value of a ServerArgs field for these engines; None if the installed version lacks the field."""
        return self.overrides.get(name, self.of_flags.get(name))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One served model and its engines."""

    name: str
    model_path: str
    update_weights: bool
    server_groups: tuple[ServerGroupConfig, ...]

    @property
    def num_gpus(self) -> int:
        """GPUs of all groups, including placeholders."""
        return sum(group.num_gpus for group in self.server_groups)

    @property
    def num_engines(self) -> int:
        """Number of engines that take requests; encoders and placeholders do not."""
        serving = [group for group in self.server_groups if group.worker_type not in ("encoder", "placeholder")]
        return sum(group.num_gpus // group.num_gpus_per_engine for group in serving)

    @property
    def has_prefill_decode(self) -> bool:
        """True if some engines only prefill or only decode."""
        return any(group.worker_type in ("prefill", "decode") for group in self.server_groups)


@dataclass(frozen=True, kw_only=True)
class SGLangConfig:
    """All models of the run, in the order in which they are assigned GPUs."""

    models: tuple[ModelConfig, ...]
    file: str | None = None
    """``--sglang-config``."""

    @property
    def num_gpus(self) -> int:
        return sum(model.num_gpus for model in self.models)


def resolve_sglang_config(args: Namespace) -> SGLangConfig:
    """Return the layout of engines that the flags describe.

    Raises:
        ConfigError: the file or a combination of flags is invalid; the message names the place.
    """
    layout = _layout(args)
    flags = {name.removeprefix("sglang_"): value for name, value in vars(args).items() if name.startswith("sglang_")}
    models = (
        replace(model, server_groups=tuple(replace(group, of_flags=flags) for group in model.server_groups))
        for model in layout.models
    )
    return SGLangConfig(models=tuple(models), file=args.sglang_config)


def _layout(args: Namespace) -> SGLangConfig:
    per_engine = args.rollout_num_gpus_per_engine
    if args.sglang_config is not None:
        where = f"--sglang-config {args.sglang_config}"
        config = load_sglang_config(
            args.sglang_config, hf_checkpoint=args.hf_checkpoint, rollout_num_gpus_per_engine=per_engine
        )
        if config.num_gpus != args.rollout_num_gpus:
            raise ConfigError(
                f"--sglang-config: the groups in {args.sglang_config} take {config.num_gpus} GPUs, --rollout-num-gpus "
                f"is {args.rollout_num_gpus}; the two must be equal. Change one of them."
            )
        for model in config.models:
            _check_encoders(f"{where}: model {model.name}", model)
            for group in model.server_groups:
                _check_nodes(f"{where}: model {model.name}", group, args.num_gpus_per_node)
        if args.eval_in_background:
            return _for_evaluation(config, f"--eval-in-background: {args.sglang_config}", args.hf_checkpoint)
        return config
    if args.eval_in_background:
        raise ConfigError(
            "--eval-in-background needs engines that no rollout uses: give --sglang-config with a second model, named "
            f"{EVALUATION_MODEL}, and its own GPUs."
        )
    groups: list[ServerGroupConfig] = []
    if args.prefill_num_servers is not None:
        prefill_gpus = args.prefill_num_servers * per_engine
        decode_gpus = args.rollout_num_gpus - prefill_gpus
        if args.prefill_num_servers < 1 or decode_gpus < per_engine:
            raise ConfigError(
                f"--prefill-num-servers is {args.prefill_num_servers}: prefill takes {prefill_gpus} of "
                f"{args.rollout_num_gpus} GPUs and leaves {decode_gpus} for decoding; both need at least one engine "
                f"of {per_engine}. Change it or --rollout-num-gpus."
            )
        groups = [_group("prefill", prefill_gpus, per_engine), _group("decode", decode_gpus, per_engine)]
    elif args.rollout_num_gpus:
        groups = [_group("regular", args.rollout_num_gpus, per_engine)]
    model = ModelConfig(
        name="default", model_path=args.hf_checkpoint, update_weights=True, server_groups=tuple(groups)
    )
    return SGLangConfig(models=(model,))


def _for_evaluation(config: SGLangConfig, where: str, hf_checkpoint: str) -> SGLangConfig:
    """Check the evaluation model, and return the layout in which pushes to the other models leave it out."""
    model = next((model for model in config.models if model.name == EVALUATION_MODEL), None)
    if model is None or model is config.models[0] or not model.num_engines:
        raise ConfigError(
            f"{where} has the models {', '.join(m.name for m in config.models)}; it needs one "
            f"named {EVALUATION_MODEL} with engines, after the one that generates."
        )
    if model.model_path != hf_checkpoint:
        raise ConfigError(
            f"{where}: the model {EVALUATION_MODEL} has the model_path {model.model_path}, and "
            f"gets the weights that are trained, those of --hf-checkpoint {hf_checkpoint}; leave the key out."
        )
    models = tuple(replace(m, update_weights=False) if m is model else m for m in config.models)
    return replace(config, models=models)


def _group(worker_type: str, num_gpus: int, per_engine: int) -> ServerGroupConfig:
    _check_division(f"{worker_type} engines", num_gpus, per_engine)
    return ServerGroupConfig(worker_type=worker_type, num_gpus=num_gpus, num_gpus_per_engine=per_engine)


def _check_encoders(where: str, model: ModelConfig) -> None:
    """Check that a model with encoders has engines that use them.

    Raises:
        ConfigError: it has none.
    """
    kinds = {group.worker_type for group in model.server_groups}
    if "encoder" in kinds and not kinds & {"regular", "prefill"}:
        raise ConfigError(
            f"{where}: it has encoders, and no regular or prefill engines that would ask them; add some."
        )


def _check_nodes(where: str, group: ServerGroupConfig, num_gpus_per_node: int) -> None:
    per_engine = group.num_gpus_per_engine
    if group.worker_type != "placeholder" and per_engine > num_gpus_per_node and per_engine % num_gpus_per_node:
        raise ConfigError(
            f"{where}: num_gpus_per_engine is {per_engine}, which is no whole number of nodes of --num-gpus-per-node "
            f"{num_gpus_per_node} GPUs; an engine over several nodes takes all of their GPUs."
        )


def _check_division(where: str, num_gpus: int, per_engine: int) -> None:
    if num_gpus % per_engine:
        raise ConfigError(
            f"{where}: {num_gpus} GPUs do not divide into engines of {per_engine}; change the number of GPUs, or "
            "num_gpus_per_engine (--rollout-num-gpus-per-engine)."
        )


def load_sglang_config(path: str, *, hf_checkpoint: str, rollout_num_gpus_per_engine: int) -> SGLangConfig:
    """Read and check the YAML file of ``--sglang-config``.

    Raises:
        ConfigError: the file is missing or malformed; the message names the key and its allowed values.
    """
    document, where = read_yaml(path, "--sglang-config"), f"--sglang-config {path}"
    models = document.get("sglang") if isinstance(document, dict) else None
    if not isinstance(models, list) or not models:
        raise ConfigError(f"{where}: the top key must be `sglang`, with a list of models under it.")
    parsed = tuple(
        _parse_model(
            model, f"{where}: model {position}", hf_checkpoint=hf_checkpoint, per_engine=rollout_num_gpus_per_engine
        )
        for position, model in enumerate(models)
    )
    names = [model.name for model in parsed]
    if len(set(names)) != len(names):
        raise ConfigError(f"{where}: the model names are {', '.join(names)}; each must be different.")
    return SGLangConfig(models=parsed)


def _parse_model(raw: Any, where: str, *, hf_checkpoint: str, per_engine: int) -> ModelConfig:
    entry = _mapping(raw, where, MODEL_KEYS)
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: `name` is {name!r}; it must be a word.")
    where = f"{where} ({name})"
    if "server_groups" in entry and "engine_groups" in entry:
        raise ConfigError(f"{where} has both server_groups and engine_groups, two names of one thing; keep the first.")
    groups = entry.get("server_groups", entry.get("engine_groups"))
    if not isinstance(groups, list):
        raise ConfigError(f"{where}: `server_groups` is {groups!r}; it must be a list of groups of engines.")
    default_per_engine = _positive(entry.get("num_gpus_per_engine", per_engine), f"{where}: num_gpus_per_engine")
    parsed = tuple(
        _parse_group(group, f"{where}, group {position}", default_per_engine) for position, group in enumerate(groups)
    )
    model_path = entry.get("model_path", hf_checkpoint)
    if model_path is not None and (not isinstance(model_path, str) or not model_path):
        raise ConfigError(f"{where}: `model_path` is {model_path!r}; it must be a folder, or be left out.")
    model_path, parsed = _served_path(model_path or hf_checkpoint, parsed, where)
    update_weights = entry.get("update_weights")
    if update_weights is None:
        update_weights = model_path == hf_checkpoint
        if not update_weights:
            logger.warning(
                "%s: model_path %s is not --hf-checkpoint, so its weights are not updated; set `update_weights: "
                "true` if the trainer should push to it",
                where,
                model_path,
            )
    if not isinstance(update_weights, bool):
        raise ConfigError(f"{where}: `update_weights` is {update_weights!r}; it must be true or false.")
    return ModelConfig(name=name, model_path=model_path, update_weights=update_weights, server_groups=parsed)


def _served_path(
    model_path: str, groups: tuple[ServerGroupConfig, ...], where: str
) -> tuple[str, tuple[ServerGroupConfig, ...]]:
    """Return the path that all groups serve, which their overrides may set, and the groups without that override.

    Raises:
        ConfigError: the groups serve different paths.
    """
    serving = [group for group in groups if group.worker_type != "placeholder"]
    paths = [str(group.overrides.get("model_path") or model_path) for group in serving] or [model_path]
    paths = [os.path.expanduser(path) for path in paths]
    if len(set(paths)) > 1:
        raise ConfigError(
            f"{where}: its groups serve {', '.join(sorted(set(paths)))}; all groups of a model serve one checkpoint. "
            "Give each checkpoint its own model."
        )
    rest = [{name: value for name, value in group.overrides.items() if name != "model_path"} for group in groups]
    groups = tuple(replace(group, overrides=overrides) for group, overrides in zip(groups, rest, strict=True))
    return paths[0], groups


def _parse_group(raw: Any, where: str, default_per_engine: int) -> ServerGroupConfig:
    entry = _mapping(raw, where, GROUP_KEYS)
    worker_type = entry.get("worker_type")
    if worker_type not in WORKER_TYPES:
        raise ConfigError(f"{where}: `worker_type` is {worker_type!r}; it must be one of {', '.join(WORKER_TYPES)}.")
    num_gpus = _positive(entry.get("num_gpus"), f"{where}: num_gpus")
    per_engine = _positive(entry.get("num_gpus_per_engine", default_per_engine), f"{where}: num_gpus_per_engine")
    if worker_type != "placeholder":
        _check_division(where, num_gpus, per_engine)
    overrides = entry.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"{where}: `overrides` is {overrides!r}; it must map ServerArgs fields to values.")
    normalised = {}
    for key, value in overrides.items():
        name = str(key).replace("-", "_")
        if name != key:
            logger.warning("%s: override %r is read as %r", where, key, name)
        if name in normalised:
            raise ConfigError(f"{where}: the override {name} is given twice, in two spellings; keep one.")
        normalised[name] = value
    return ServerGroupConfig(
        worker_type=worker_type, num_gpus=num_gpus, num_gpus_per_engine=per_engine, overrides=normalised
    )


def _mapping(raw: Any, where: str, known: frozenset[str]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} is {raw!r}; it must be a mapping with the keys {', '.join(sorted(known))}.")
    unknown_keys = sorted(set(map(str, raw)) - known)
    if unknown_keys:
        raise ConfigError(f"{where}: unknown key {', '.join(unknown_keys)}; the keys are {', '.join(sorted(known))}.")
    return raw


def _positive(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where} is {value!r}; it must be a whole number of at least 1.")
    return value


def size_problems(layout: SGLangConfig) -> Iterator[str]:
    """Yield a message for each size that does not divide the GPUs or tensor-parallel ranks of a group's engines."""
    groups = [(model.name, group) for model in layout.models for group in model.server_groups]
    for name_of_model, group in groups:
        own, num_gpus = group.overrides, group.num_gpus_per_engine
        sizes = {name: group.setting(name) for name in ("pp_size", "dp_size", "ep_size")}
        if group.worker_type == "placeholder" or not all(isinstance(one, int) and one > 0 for one in sizes.values()):
            continue  # another check reports overrides that are not sizes
        tp_size = num_gpus // sizes["pp_size"]
        engine = f"--rollout-num-gpus-per-engine is {num_gpus}"
        if layout.file is not None:
            engine = f"the {group.worker_type} engines of {name_of_model} have {num_gpus} GPUs"
        for name, size in sizes.items():
            whole, parts = (num_gpus, "GPUs") if name == "pp_size" else (tp_size, "tensor-parallel ranks")
            if whole % size:
                flag = f"--sglang-config {layout.file}: " if name in own else "--sglang-"
                yield (
                    f"{flag}{name.replace('_', '-')} is {size} and {engine}: the {whole} {parts} of an engine must "
                    f"divide into {size} groups; use {nearest_divisor(whole, size)}."
                )


def share_problems(layout: SGLangConfig) -> Iterator[str]:
    """Yield a message if ``--offload-train-if-needed`` cannot know how much memory the engines use."""
    if any("mem_fraction_static" in group.overrides for model in layout.models for group in model.server_groups):
        yield (
            f"--sglang-config {layout.file} sets mem_fraction_static and --offload-train-if-needed is given; "
            "set --sglang-mem-fraction-static for all engines instead."
        )


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of ``number`` that is closest to ``wanted``."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))


def own_dtype(asked: str | None, of_trainer: str | None) -> str | None:
    """Return the dtype of an engine that this job starts: ``asked``, or the trainer's, so that log-probs agree.

    SGLang's "auto" counts as not asked: it would choose float16 for a float32 checkpoint.
    """
    return of_trainer if asked in (None, "auto") else asked


def trainer_dtype(args: Namespace) -> str | None:
    """Return the dtype in which the trainer computes; None if no flag sets it."""
    if args.fp16:
        return "float16"
    if args.bf16:
        return "bfloat16"
    return "float32" if args.fp32 else None


def served_dtype(asked: str, folder: str, *, of_fp32: Callable[[Mapping[str, Any]], str]) -> str:
    """Return the dtype of an engine whose ServerArgs have ``asked``; "auto" follows config.json, as in SGLang.

    Returns "" if "auto" has no config.json to read.

    Args:
        of_fp32: maps config.json to the dtype that "auto" chooses for an fp32 checkpoint.
    """
    if asked != "auto":
        return asked
    if not (Path(folder) / "config.json").is_file():
        return ""
    config = read_model_config(folder)
    parts = (config, config.get("text_config") or {})
    named = next((name for part in parts if (name := part.get("dtype") or part.get("torch_dtype"))), "float32")
    return str(named) if str(named) != "float32" else of_fp32(config)


RENAMED_FIELDS = {"cuda_graph_max_bs": "cuda_graph_max_bs_decode", "cuda_graph_bs": "cuda_graph_bs_decode"}
"""ServerArgs fields that later versions of SGLang renamed; an --sglang-config may use either name."""


def present_name(name: str, known_fields: Collection[str]) -> str:
    """Return the name of a field in the installed ServerArgs."""
    later = RENAMED_FIELDS.get(name, name)
    return later if later in known_fields and name not in known_fields else name
