"""Flags of conversations with tools and environments, tasks of reasoning-gym, and mixtures of data sets."""

from __future__ import annotations

import argparse
import math
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.flags.group import FlagGroup
from slime.flags.kinds import file_path
from slime.flags.overlay import read_yaml
from slime.utils.errors import ConfigError
from slime.utils.misc import load_function

GYM = "gym:"
"""Prefix of a task of reasoning-gym in the place of a prompt file."""
MULTI_TURN = "slime.rollout.multi_turn.generate"
"""Generate function of ``--rollout-tools`` and ``--rollout-environment``."""
BUFFERED_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
MIXED_SOURCE = "slime.ext.environments.mixture.MixedDataSource"
"""Data source of a mixture, in place of the default one."""

FLAG = "--prompt-data"
_SOURCE_KEYS = ("path", "name", "weight", "input_key", "label_key")
_TEXTS = {"path", "name", "input_key"}
CURRICULUM = {"solved": 1.0, "low": 0.0, "high": 1.0, "skip_epochs": 2}


@dataclass(frozen=True)
class Mix:
    """The content of a mix.yaml."""

    sources: list[dict[str, Any]]
    """The entries of the data sets; ``weight`` is a list of (prompts taken, weight), in order."""
    curriculum: dict[str, float] | None
    """``solved``: the reward of a right answer; a prompt whose share of them is at most ``low``, or at least ``high``,
    is left out of the next ``skip_epochs`` epochs of its data set."""


def read_mix(path: str) -> Mix:
    """Return the content of a mix.yaml.

    Raises:
        ConfigError: it has other keys, or values that cannot work.
    """
    content = read_yaml(path, FLAG)
    sources = content.get("datasets") if isinstance(content, Mapping) else None
    if not isinstance(sources, list) or not sources or set(content) - {"datasets", "curriculum"}:
        raise ConfigError(f"{FLAG} {path}: write 'datasets:' with a list of data sets, and maybe 'curriculum:'.")
    for source in sources:
        if not isinstance(source, Mapping) or "path" not in source or set(source) - set(_SOURCE_KEYS):
            raise ConfigError(
                f"{FLAG} {path}: {source!r}; a data set has path, and maybe {', '.join(_SOURCE_KEYS[1:])}."
            )
        for key in _TEXTS & source.keys():
            if not source[key] or not isinstance(source[key], str):
                raise ConfigError(f"{FLAG} {path}: {key} is {source[key]!r}; it is a text, or is left out.")
    named = [
        {
            **source,
            "path": os.path.expanduser(source["path"]),
            "name": str(source.get("name", source["path"])),
            "weight": _points(source, path),
        }
        for source in sources
    ]
    names = [source["name"] for source in named]
    if len(set(names)) < len(names):
        raise ConfigError(f"{FLAG} {path}: two data sets are named alike ({', '.join(names)}); give them names.")
    curriculum = content.get("curriculum")
    if curriculum is not None:
        wrong = not isinstance(curriculum, Mapping) or set(curriculum) - set(CURRICULUM)
        if wrong or not all(_is_number(value) for value in curriculum.values()):
            raise ConfigError(f"{FLAG} {path}: curriculum is {curriculum!r}; it has numbers: {', '.join(CURRICULUM)}.")
        curriculum = CURRICULUM | dict(curriculum)
        low, high, epochs = (curriculum[name] for name in ("low", "high", "skip_epochs"))
        if low >= high or epochs != int(epochs) or epochs < 0:
            raise ConfigError(
                f"{FLAG} {path}: curriculum has low {low}, high {high}, skip_epochs {epochs}; low must be below high, "
                "and skip_epochs a whole number from 0 on."
            )
    return Mix(named, curriculum)


def _points(source: Mapping[str, Any], path: str) -> list[tuple[float, float]]:
    weight = source.get("weight", 1)
    points = list((weight if isinstance(weight, Mapping) else {0: weight}).items())
    if not points or not all(_is_number(x) and x >= 0 for point in points for x in point):
        raise ConfigError(
            f"{FLAG} {path}: weight is {weight!r}; it is a number from 0 on, or a map of prompts taken to weights."
        )
    return sorted(points)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


def add_environment_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the environments group to ``parser``."""
    group = parser.add_argument_group("environments", "Conversations of the policy with tools and environments.")
    group.add_argument(
        "--rollout-tools",
        type=file_path,
        nargs="+",
        metavar="PATH",
        help="Python functions that the policy may call; annotations and docstring become their description. "
        "'mcp:COMMAND' or mcp:URL: the tools of an MCP server.",
    )
    group.add_argument(
        "--rollout-environment",
        type=file_path,
        metavar="PATH",
        help="Class of an environment of text: reset(seed, options) and step(action), as Gymnasium has them.",
    )


def derive_turns(args: Namespace) -> None:
    """Have tools and environments played by the stock function where no other is named, and tasks read."""
    args.prompt_readers = args.prompt_readers | {GYM: "slime.ext.environments.gym.read_task"}
    if (args.rollout_tools or args.rollout_environment) and args.custom_generate_function_path is None:
        args.custom_generate_function_path = MULTI_TURN


def _is_mixture(prompt_data: str | None) -> bool:
    return prompt_data is not None and prompt_data.endswith((".yaml", ".yml"))


def derive_mixture(args: Namespace) -> None:
    """Have a mixture read by its own data source."""
    if not _is_mixture(args.prompt_data):
        return
    if args.runs_here or Path(args.prompt_data).is_file():
        args.prompt_sources = read_mix(args.prompt_data).sources
    if args.rollout_global_dataset and args.data_source_path == BUFFERED_SOURCE:
        args.data_source_path = MIXED_SOURCE


def check_mixture(args: Namespace) -> Iterator[str]:
    """Yield a message for a data source that cannot read a mixture."""
    if not _is_mixture(args.prompt_data) or not args.rollout_global_dataset or args.data_source_path == MIXED_SOURCE:
        return
    source = load_function(args.data_source_path)
    if not isinstance(source, type) or not issubclass(source, load_function(MIXED_SOURCE)):
        yield (
            f"{FLAG} {args.prompt_data} is a mixture, which --data-source-path {args.data_source_path} does not read; "
            f"derive it from {MIXED_SOURCE}, or drop one of the two flags."
        )


def check_gym(args: Namespace) -> Iterator[str]:
    """Yield a message where nothing isolates the scorers of tasks, which evaluate what the policy wrote."""
    if args.runs_here and any(source["path"].startswith(GYM) for source in args.prompt_sources):
        from slime.isolation.view import check_local_sandbox

        try:
            check_local_sandbox(args)
        except ConfigError as error:
            yield str(error)


GROUP = FlagGroup(add_environment_arguments, derive=(derive_turns, derive_mixture), check=(check_mixture, check_gym))
