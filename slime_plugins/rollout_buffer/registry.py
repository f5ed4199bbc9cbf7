"""Generators: find them, fill in the defaults of one, and run one in its own process.

python -m slime_plugins.rollout_buffer.registry FILE JSON     ``run_rollout`` of FILE with the settings in JSON
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.utils.errors import ConfigError

Item = dict[str, Any]
Group = tuple[str, list[Item]]

BUILT_IN = Path(__file__).with_name("generator")


def keep_group(group: Group, task_type: str) -> Group:
    """Return the group as it is."""
    return group


def has_enough_items(group: Group, min_size: int, task_type: str) -> bool:
    """Return True when every repeat of the instance has come back."""
    return len(group[1]) >= min_size


def count_groups(temp_data: dict[str, list[Item]]) -> dict[str, Any]:
    """Count the groups and average the rewards written since the last reading."""
    rewards = [float(item["reward"]) for items in temp_data.values() for item in items]
    num_groups = len(temp_data)
    return {
        "total_samples": len(rewards),
        "num_groups": num_groups,
        "avg_group_size": len(rewards) / num_groups if num_groups else 0.0,
        "avg_reward": sum(rewards) / len(rewards) if rewards else 0.0,
    }


@dataclass(frozen=True, kw_only=True)
class Generator:
    """One kind of task."""

    task_type: str
    file: Path
    run_rollout: Callable[[dict[str, Any]], None]
    transform_group: Callable[[Group, str], Group] = keep_group
    is_valid_group: Callable[[Group, int, str], bool] = has_enough_items
    get_group_data_meta_info: Callable[[dict[str, list[Item]]], dict[str, Any]] = count_groups


def load_module(file: Path) -> ModuleType:
    """Import ``file``; one of the package under its own name, so that child processes can import it."""
    inside = file.parent == BUILT_IN
    name = f"{__package__}.generator.{file.stem}" if inside else f"slime_generator_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} cannot be imported; a generator is a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_generators(folders: Iterable[Path] = ()) -> dict[str, Generator]:
    """Load the generators of the package and of ``folders``, by task type; later folders win.

    Raises:
        ConfigError: a folder does not exist, a file lacks ``TASK_TYPE`` or ``run_rollout``, or two of one folder have
            the same task type.
    """
    found: dict[str, Generator] = {}
    for folder in [BUILT_IN, *folders]:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; it must hold *_generator.py files.")
        of_folder: dict[str, Generator] = {}
        for file in sorted(folder.glob("*_generator.py")):
            module = load_module(file)
            missing = [name for name in ("TASK_TYPE", "run_rollout") if not hasattr(module, name)]
            if missing:
                raise ConfigError(f"{file} has no {' and no '.join(missing)}; every generator needs both.")
            own = ("transform_group", "is_valid_group", "get_group_data_meta_info")
            optional = {name: getattr(module, name) for name in own if hasattr(module, name)}
            task_type = module.TASK_TYPE
            if task_type in of_folder:
                raise ConfigError(f"{file} and {of_folder[task_type].file} both have TASK_TYPE {task_type!r}.")
            of_folder[task_type] = Generator(
                task_type=task_type, file=file, run_rollout=module.run_rollout, **optional
            )
        found |= of_folder
    return found


if __name__ == "__main__":
    generator_file, settings = sys.argv[1:3]
    load_module(Path(generator_file)).run_rollout(json.loads(settings))
