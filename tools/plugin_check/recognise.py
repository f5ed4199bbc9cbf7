"""Which flag a plug-in is for, by its signature."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from slime.algorithms.advantages import Estimator
from slime.flags.hook_checks import DATA_SOURCE_METHODS, check_import, split_path
from slime.flags.hooks import HOOKS, Hook
from slime.utils.errors import HookError
from slime.utils.plugins import import_plugin

OTHER_NAMES = {"params": "sampling_params", "data_buffer": "data_source", "data": "rollout_data"}
"""Common names of parameters -> those of the contracts."""
USUAL = ("--custom-rm-path", "--rollout-function-path")
"""Where two flags fit equally well, these are meant."""


@dataclass(frozen=True)
class Recognised:
    """The flag that a plug-in is for, and other flags of the run that go with it."""

    flag: str
    settings: tuple[str, ...] = ()


def recognise(path: str) -> Recognised:
    """Return what the attribute at ``path`` is, by its methods or the names of its parameters.

    Raises:
        HookError: it cannot be imported, or may be several things.
    """
    module_name, attribute = split_path(path, "slime check")
    target: Any = getattr(import_plugin(module_name, f"slime check {path}"), attribute, None)
    if target is None:
        raise HookError(f"{module_name} has no {attribute}; correct the path {path}.")
    if inspect.isclass(target):
        return _of_class(path, target)
    if isinstance(target, Estimator):
        return Recognised("--advantage-estimator")
    if not callable(target):
        raise HookError(f"{path} is of type {type(target).__name__}; name a function, a class or an Estimator.")
    names = list(inspect.signature(target).parameters)
    is_of_samples = names[:2] == ["args", "samples"]
    if is_of_samples and inspect.iscoroutinefunction(target):
        return Recognised("--custom-rm-path", ("--group-rm",))
    scores = {hook.flag: _score(hook, path, names) for hook in HOOKS if hook.kind != "class"}
    best = max(scores.values())
    found = [flag for flag, score in scores.items() if score == best and best]
    found = [flag for flag in USUAL if flag in found] or found
    if len(found) == 1:
        return Recognised(found[0])
    if not found and "args" not in names and inspect.getdoc(target):
        return Recognised("--rollout-tools")
    said = f"may be for {' or '.join(found)}" if found else "fits no flag by the names of its parameters"
    said += ", or for --custom-rm-path with --group-rm" if is_of_samples else ""
    flag = found[0] if found else "--custom-rm-path"
    raise HookError(
        f"{path}({', '.join(names)}) {said}. Say which one, as in: slime check {flag} {path}. "
        "slime check --list shows all flags."
    )


def _of_class(path: str, target: type) -> Recognised:
    if all(hasattr(target, name) for name in DATA_SOURCE_METHODS):
        return Recognised("--data-source-path")
    if hasattr(target, "reset") and hasattr(target, "step"):
        return Recognised("--rollout-environment")
    raise HookError(
        f"The class {path} is neither a data source ({', '.join(DATA_SOURCE_METHODS)}) nor an environment (reset, "
        "step). If it is meant to be one, say which: slime check --data-source or --environment."
    )


def _score(hook: Hook, path: str, names: list[str]) -> int:
    """Return how many parameters have the names of the contract; 0 for a function that cannot be called so."""
    try:
        check_import(hook, path, hook.flag)
    except HookError:
        return 0
    contract = list(inspect.signature(hook.protocol.__call__).parameters.values())[1:]
    ordered = [p.name for p in contract if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    named = {p.name for p in contract if p.kind is inspect.Parameter.KEYWORD_ONLY}
    given = [OTHER_NAMES.get(name, name) for name in names]
    score = sum(a == b for a, b in zip(ordered, given, strict=False)) + len(named & set(given))
    return score if score > 1 or ordered == given else 0
