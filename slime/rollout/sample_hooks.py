"""``--rollout-sample-hook-path``: user code that runs on each sample after generation and before its reward."""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.flags.config import FlagConfig
from slime.rollout.base_types import check_samples
from slime.rollout.run_state import current_run
from slime.utils.errors import HookError
from slime.utils.misc import accepted, load_function
from slime.utils.plugins import PluginCall, await_plugin, call_plugin
from slime.utils.types import Sample


@dataclass(frozen=True, kw_only=True)
class _HookConfig(FlagConfig):
    rollout_sample_hook_path: list[str] | str | None = None


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Set the rollout id that hooks receive; None resets the state of the run."""
    current_run().begin(rollout_id)


async def apply_rollout_sample_hooks(args: Namespace, value: Any, *, evaluation: bool = False, **kwargs: Any) -> Any:
    """Run every hook, in flag order, on each sample of ``value``.

    Args:
        args: The run's arguments; ``rollout_sample_hook_path`` lists the hooks.
        value: A sample, or a list of samples from a generate function that fans out.
        evaluation: True for samples of an evaluation.
        kwargs: Extra keyword arguments, passed with ``rollout_id`` and ``evaluation`` to hooks that accept them.

    Returns:
        ``value``, with samples replaced by those that hooks returned.

    Raises:
        HookError: a hook returned neither a sample nor None.
    """
    paths = _HookConfig.of(args).rollout_sample_hook_path or []
    if not paths:
        return value
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, item, evaluation=evaluation, **kwargs) for item in value]
    facts = {"rollout_id": current_run().rollout_id, "evaluation": evaluation, **kwargs}
    for path in [paths] if isinstance(paths, str) else paths:
        hook = load_function(path)
        call = PluginCall("--rollout-sample-hook-path", path, value)
        ready = functools.partial(call_plugin, call, hook, args, value, **accepted(hook, facts))
        returned = await await_plugin(call, _run, ready)
        if returned is not None and not isinstance(returned, Sample):
            raise HookError(f"{call} returned {type(returned).__name__}; a sample hook must return a Sample or None.")
        value = value if returned is None else returned
        check_samples(value, f"{call} left")
    return value


async def _run(hook: Callable[[], Any]) -> Any:
    """Call a hook and await its result if needed."""
    returned = hook()
    return await returned if inspect.isawaitable(returned) else returned
