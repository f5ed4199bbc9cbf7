"""Evaluation data sets: one ``EvalDatasetConfig`` each, from ``--eval-config`` or ``--eval-prompt-data``.

The YAML file, at its root or under ``eval:``::

    defaults: {n_samples_per_eval_prompt: 4}
    datasets:
      - {name: aime, path: /data/aime.jsonl, rm_type: math}

``datasets`` may also map names to entries.  A value comes from the entry, else from ``defaults``, else from the flags:
``--eval-x`` before ``--rollout-x`` or ``--x``.  If an entry sets only ``rm_type``, a grader function from ``defaults``
or a flag does not apply to it.
"""

from __future__ import annotations

import argparse
import functools
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from slime.flags.data import add_data_arguments, add_eval_arguments
from slime.flags.group import FlagGroup
from slime.flags.hub import data_file
from slime.flags.kinds import file_path, non_negative_int, positive_float, positive_int, wait_s
from slime.flags.overlay import read_yaml, yaml_problem
from slime.flags.parser import Parser
from slime.flags.reward import add_reward_arguments
from slime.flags.rollout import add_rollout_arguments
from slime.utils.errors import ConfigError

FALLBACK_FLAGS: dict[str, tuple[str, ...]] = {
    "custom_rm_path": ("eval_custom_rm_path", "custom_rm_path"),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "multimodal_keys": ("multimodal_keys",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt", "n_samples_per_prompt"),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "min_new_tokens": ("eval_min_new_tokens",),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "skip_special_tokens": ("rollout_skip_special_tokens",),
}
"""Field -> attributes of ``args``; without a value in the YAML file, the first that is set gives the value."""


@dataclass(kw_only=True)
class EvalDatasetConfig:
    """One evaluation data set: its path, and how it is read, sampled and graded."""

    name: str
    """Metrics are logged as ``eval/<name>``."""
    path: str
    """.jsonl or .parquet file, optionally with ``@[a:b]``."""
    rm_type: str | None = None
    """Grader; takes precedence over ``--rm-type`` and ``--custom-rm-path``."""
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str = "metadata"
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    """Tokens."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    # The next fields are for custom evaluation functions; the default one does not read them.
    app_service: Any = None
    eval_task_timeout: float | None = None
    min_eval_samples: int | None = None
    eval_early_stop_remaining: int | None = None
    eval_early_stop_idle_timeout: float | None = None
    message_processor: Any = None
    reward_model: Any = None
    remote_environment: Any = None
    metadata_overrides: dict[str, Any] | None = None
    """Entries set in the metadata of every sample; they override the row's."""

    def __post_init__(self) -> None:
        for name in ("name", "path"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(
                    f"An evaluation data set has {name} {getattr(self, name)!r}; each one in --eval-config or "
                    f"--eval-prompt-data needs a {name}."
                )
        if self.metadata_overrides is not None and not isinstance(self.metadata_overrides, Mapping):
            raise ConfigError(
                f"--eval-config: metadata_overrides of {self.name!r} is {self.metadata_overrides!r}; it must be a map."
            )
        for name in ("min_eval_samples", "n_samples_per_eval_prompt"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} of the evaluation data set {self.name!r} is {value}; it must be above 0.")

        shortest, longest = self.min_new_tokens, self.max_response_len
        if shortest is not None and longest is not None and shortest > longest:
            raise ConfigError(
                f"The evaluation data set {self.name!r} has min_new_tokens {shortest} (--eval-min-new-tokens), above "
                f"max_response_len {longest} (--eval-max-response-len)."
            )

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """Key under which rows are cached: equal keys mean equal rows and columns."""
        return self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key

    def inject_metadata(self, metadata: Any) -> dict[str, Any]:
        """Return a copy of a sample's metadata with this data set's overrides and grader."""
        merged = dict(metadata) if isinstance(metadata, Mapping) else {}
        merged.update(self.metadata_overrides or {})
        if self.rm_type is not None:
            merged["rm_type"] = self.rm_type
        return merged


_FIELDS = {spec.name for spec in fields(EvalDatasetConfig)}


@functools.cache
def _flags_of_fields() -> tuple[Parser, dict[str, argparse.Action]]:
    """Return a parser, and a flag for each field with a type: slime's flag, or one created here."""
    parser = Parser(add_help=False)
    for add_arguments in (add_eval_arguments, add_rollout_arguments, add_data_arguments, add_reward_arguments):
        add_arguments(parser)
    for name, kind in (
        ("custom-rm-path", file_path),
        ("custom-generate-function-path", file_path),
        ("repetition-penalty", positive_float),
        ("eval-task-timeout", wait_s),
        ("min-eval-samples", positive_int),
        ("eval-early-stop-remaining", non_negative_int),
        ("eval-early-stop-idle-timeout", wait_s),
    ):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--no-stop-trim", action="store_true")
    found = {
        name: next((action for flag in FALLBACK_FLAGS.get(name, (name,)) if (action := parser.flag_with(flag))), None)
        for name in _FIELDS
    }
    return parser, {name: action for name, action in found.items() if action is not None}


def _checked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return an entry of the file with its values checked as on the command line; null omits a field."""
    parser, flags = _flags_of_fields()
    return {
        name: parser.value_from_file(flags[name], value, f"--eval-config: {name} of {where}")
        if name in flags and value is not None
        else value
        for name, value in values.items()
    }


def eval_datasets_from_args(args: Namespace) -> list[EvalDatasetConfig]:
    """Return the data sets of ``--eval-config``, or else of ``--eval-prompt-data``; empty without both.

    Raises:
        ConfigError: the file or the list of names and paths is malformed.
    """
    if args.eval_config is not None:
        datasets, defaults = _read_yaml(args.eval_config)
        return build_eval_dataset_configs(args, ensure_dataset_list(datasets), defaults)
    if args.eval_prompt_data is not None:
        return build_eval_dataset_configs(args, _name_path_pairs(args.eval_prompt_data), {})
    return []


def ensure_dataset_list(config: Any) -> list[dict[str, Any]]:
    """Return data set entries as a list, from a list or from a mapping of name to entry."""
    if config is None:
        return []
    if isinstance(config, Mapping):
        config = [{"name": name, **_as_mapping(entry, name)} for name, entry in config.items()]
    if not isinstance(config, (list, tuple)):
        raise ConfigError(f"--eval-config: datasets is {config!r}; it must be a list or a map of names to entries.")
    return [dict(_as_mapping(entry, position)) for position, entry in enumerate(config)]


def build_eval_dataset_configs(
    args: Namespace, raw: list[dict[str, Any]], defaults: Mapping[str, Any] | None
) -> list[EvalDatasetConfig]:
    """Build one config per entry of ``raw``, completed from ``defaults`` and then from the flags.

    Raises:
        ConfigError: an unknown key, a missing name or path, or a name used twice.
    """
    defaults = dict(defaults or {})
    _refuse_unknown(defaults, _FIELDS - {"name", "path"}, "defaults")
    defaults = _checked(defaults, "defaults")
    from_flags = {}
    for name, flags in FALLBACK_FLAGS.items():
        given = (vars(args).get(flag) for flag in flags)
        from_flags[name] = next((value for value in given if value is not None), None)
    configs = []
    for position, entry in enumerate(raw):
        where = f"data set {entry.get('name', position)!r}"
        _refuse_unknown(entry, _FIELDS, where)
        entry = _checked(entry, where)
        values = from_flags | defaults | entry
        grader = next(
            (level for level in (entry, defaults) if level.get("rm_type") or level.get("custom_rm_path")), {}
        )
        if grader.get("rm_type"):
            values["custom_rm_path"] = grader.get("custom_rm_path")
        kept = {name: value for name, value in values.items() if value is not None}
        configs.append(EvalDatasetConfig(**{"name": "", "path": ""} | kept))
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise ConfigError(f"Evaluation data sets are named {', '.join(names)}; each name may be used once.")
    return configs


def _name_path_pairs(values: list[str]) -> list[dict[str, Any]]:
    """Split ``name path name path ...``; a single value is a path, and its data set is called aime."""
    if len(values) == 1:
        return [{"name": "aime", "path": values[0]}]
    if len(values) % 2:
        raise ConfigError(
            f"--eval-prompt-data has {len(values)} values ({' '.join(values)}); "
            "write NAME PATH for each data set, or a single PATH."
        )
    return [{"name": name, "path": path} for name, path in zip(values[::2], values[1::2], strict=True)]


def _read_yaml(path: str) -> tuple[Any, Any]:
    """Return ``(datasets, defaults)`` of an evaluation file."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    content = read_yaml(path, "--eval-config")
    if not isinstance(content, Mapping):
        raise ConfigError(f"--eval-config {path} has no datasets; list them under datasets: or eval.datasets:.")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (YAMLError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"--eval-config: {path} cannot be read: {yaml_problem(error)}.") from error
    if isinstance(content, Mapping) and isinstance(content.get("eval"), Mapping):
        content = content["eval"]
    if not isinstance(content, Mapping) or not content.get("datasets"):
        raise ConfigError(f"--eval-config {path} has no datasets; list them under datasets: or eval.datasets:.")
    _refuse_unknown(content, {"datasets", "defaults"}, path)
    return content["datasets"], _as_mapping(content.get("defaults") or {}, "defaults")


def _as_mapping(value: Any, name: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"--eval-config: {name} is {value!r}; it must be a map of fields to values.")
    return value


def _refuse_unknown(values: Mapping[Any, Any], allowed: set[str], where: str) -> None:
    unknown = sorted(str(name) for name in set(values) - allowed)
    if unknown:
        raise ConfigError(
            f"--eval-config: {where} has unknown keys {', '.join(unknown)}; allowed are {', '.join(sorted(allowed))}."
        )


def derive_evaluation(args: Namespace) -> None:
    """Derive evaluation settings from the rollout's if they are not given."""
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    args.eval_datasets = eval_datasets_from_args(args)
    for dataset in args.eval_datasets if args.runs_here else ():
        dataset.path = data_file(dataset.path, f"evaluation data set {dataset.name}:")


GROUP = FlagGroup(
    add_eval_arguments,
    derive=(derive_evaluation,),
    needs=(
        ("eval_interval", "eval_prompt_data eval_config", "they name the data"),
        ("eval_in_background", "eval_interval", "that says when"),
    ),
    excludes=(
        ("eval_in_background", "debug_rollout_only", "there is no trainer whose weights could be evaluated"),
        ("eval_prompt_data", "eval_config", "both name data sets"),
    ),
    once=(derive_evaluation,),
)
