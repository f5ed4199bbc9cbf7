"""The records that the rollout manager logs, unless a hook of the user's does it instead."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from slime.observability.logging_utils import log
from slime.observability.rollout_metrics import compute_eval_record, compute_rollout_record
from slime.utils.errors import DataError
from slime.utils.misc import call_hook
from slime.utils.types import Sample


def log_rollout(
    args: Namespace, rollout_id: int, samples: Sequence[Sample], extra: Mapping[str, Any] | None, seconds: float
) -> None:
    """Log one rollout; ``--custom-rollout-log-function-path`` may do it instead by returning something true."""
    path = args.custom_rollout_log_function_path
    if path:
        if call_hook("--custom-rollout-log-function-path", path, rollout_id, args, samples, extra, seconds):
            return
    log(args, compute_rollout_record(args, rollout_id, samples, extra, seconds), step_key="rollout/step")


def log_eval(
    args: Namespace,
    rollout_id: int,
    data: Mapping[str, Mapping[str, Any]],
    extra: Mapping[str, Any] | None,
    seconds: float,
) -> dict[str, float]:
    """Log one evaluation; ``--custom-eval-rollout-log-function-path`` may do it instead.  Return the record."""
    path = args.custom_eval_rollout_log_function_path
    is_logged = False
    if path:
        is_logged = bool(call_hook("--custom-eval-rollout-log-function-path", path, rollout_id, args, data, extra))
    try:
        record = compute_eval_record(args, rollout_id, data, extra) | {"perf/time_eval_s": seconds}
    except DataError:
        if not is_logged:
            raise
        return {"perf/time_eval_s": seconds}  # rewards that only the hook can read
    if not is_logged:
        log(args, record, step_key="eval/step")
    return record
