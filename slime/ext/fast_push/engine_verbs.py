"""The steps of a two-phase push on the engine's side, run in the engine's actor (``EngineProxy.run``).

A push is ``begin_weight_update``, ``receive_*``, ``acknowledge_weight_update``, ``commit_weight_update``.  Each step
sends a message of the same name to slime's loader inside the server (``weight_receiver``).  ``push_id`` identifies one
attempt at a push; requests of another attempt are refused.  Between begin and commit the engine holds neither the old
nor the new weights and must not serve.
"""

from __future__ import annotations

import base64
import json
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.backends.sglang_utils.weight_verbs import WeightVerbs
from slime.ext.fast_push.loader_report import CHECK_REPORT, flatten_reports
from slime.ext.fast_push.loaders import RECEIVER
from slime.ext.fast_push.messages import PUSH_REPORT, encode
from slime.utils.errors import EngineError, WeightSyncError

REPORT_FIELDS = ("push_id", "needs_manifest", "buckets", "problems", "is_unpacked", "seconds")
"""Fields of the loader's report after each message."""
SHOWN_PROBLEMS = 20


@dataclass
class LoaderState:
    """What an engine's actor knows about the push begun last."""

    loader: str = RECEIVER
    """The name of slime's loader in this server."""
    acknowledged: str | None = None
    """Id of the push, if its last acknowledgement was complete and without problems."""
    is_unpacked: bool = False
    """True if the model has layers that must be repacked before it serves."""
    num_buckets: int = 0


def _state(engine: WeightVerbs) -> LoaderState:
    state: LoaderState = vars(engine).setdefault("_loader_state", LoaderState())
    return state


def begin_weight_update(
    engine: WeightVerbs, manifest_id: str, push_id: str, manifest_json: str | None = None, loader: str = RECEIVER
) -> list[str] | None:
    """Prepare for the buckets of a ``Manifest`` and drop any unfinished push.

    The engine checks that it can place every tensor of the manifest and that the tensors fill all its parameters.

    Args:
        manifest_json: the manifest itself, for an engine that does not know it.

    Returns:
        One digest per bucket, as in ``acknowledge_weight_update``, for constant buckets that the engine's memory still
        holds from an earlier push, which need not be sent; "" for all others.  None if the engine does not know the
        manifest and must be called again with it.

    Raises:
        WeightSyncError: the model has no place for a tensor, or a place that no tensor fills.
    """
    state = _state(engine)
    state.loader, state.acknowledged, engine.unfinished_push = loader, None, push_id
    if engine.node_rank != 0:
        return []
    content = {"manifest_id": manifest_id}
    if manifest_json is not None:
        content["manifest"] = base64.b64encode(zlib.compress(manifest_json.encode(), 1)).decode("ascii")
    report = _ask(engine, "begin_weight_update", push_id, **content)
    if report["needs_manifest"] and manifest_json is None:
        return None
    _refuse_problems(engine, report, "cannot take this push")
    held: list[str] = report["buckets"]
    state.num_buckets = len(held)
    return held


def receive_weight_bucket(engine: WeightVerbs, push_id: str, bucket_index: int, group_name: str) -> None:
    """Load one flat bucket that rank 0 of a weight group broadcasts.

    Problems are reported by ``acknowledge_weight_update``; loading a bucket twice is harmless.

    Args:
        group_name: see ``join_weight_group``.

    Raises:
        WeightSyncError: another push was begun since, or none.
    """
    _receive(engine, push_id)
    _send(engine, "receive_weight_bucket", push_id, bucket_index=bucket_index, group_name=group_name)


def receive_weight_buckets(engine: WeightVerbs, push_id: str, payloads: Mapping[int, Sequence[str]]) -> None:
    """Load flat buckets from memory that the engine can map; otherwise like ``receive_weight_bucket``.

    GPU ``k`` begins with the ``k``-th bucket (modulo their number), so that not all GPUs read from the same one.

    Args:
        payloads: bucket index in the manifest -> handles to the flat buffer, one per GPU of the engine; they stay
            open until the push is acknowledged.

    Raises:
        WeightSyncError: another push was begun since, or none.
    """
    _receive(engine, push_id)
    by_gpu = []
    for gpu in range(engine.tp_size):
        handles = [(index, handles[gpu]) for index, handles in payloads.items()]
        start = gpu % len(handles)
        by_gpu.append({"payload": handles[start:] + handles[:start]})
    _send(engine, "receive_weight_buckets", push_id, by_gpu=by_gpu)


def receive_weight_folder(engine: WeightVerbs, push_id: str, folder: str) -> None:
    """Load all buckets of the push from the safetensors files in ``folder``, a path on the engine's hosts."""
    _receive(engine, push_id)
    for index in range(_state(engine).num_buckets):
        _send(engine, "receive_weight_folder", push_id, bucket_index=index, folder=folder)


def acknowledge_weight_update(engine: WeightVerbs, push_id: str) -> dict[str, Any]:
    """Return ``{"push_id", "buckets", "problems", "seconds"}`` for the weights that the engine holds.

    ``buckets``: each bucket's digest as 16 hexadecimal digits (``slime.weights.digest``: ``combine`` over the digests
    of its slices, in the manifest's order), "" for a bucket that did not arrive.  ``problems``: one sentence for each
    thing that keeps the engine from serving these weights, over all ranks.  ``seconds``: device time of the slowest
    rank by part: "copy" from other GPUs, "digest", "place".
    """
    _require_push(engine, push_id)
    if engine.node_rank != 0:
        return {"push_id": push_id, "buckets": [], "problems": [], "seconds": {}}
    report = _ask(engine, "acknowledge_weight_update", push_id)
    if report["push_id"] != push_id:
        raise WeightSyncError(
            f"engine {engine.rank} was asked about push {push_id}, but its loader has {report['push_id']!r}; "
            "was its server restarted? Begin the push again"
        )
    state = _state(engine)
    is_complete = all(report["buckets"]) and not report["problems"]
    state.acknowledged = push_id if is_complete else None
    state.is_unpacked = report["is_unpacked"]
    return {name: report[name] for name in ("push_id", "buckets", "problems", "seconds")}


def commit_weight_update(engine: WeightVerbs, push_id: str, weight_version: str) -> None:
    """Set the engine's version to ``weight_version`` after a complete and acknowledged push.

    First, the loader repacks the layers that SGLang repacks after a load.

    Raises:
        WeightSyncError: the push is not complete and acknowledged, or repacking fails; the version is unchanged.
    """
    _require_push(engine, push_id)
    state = _state(engine)
    if engine.node_rank == 0:
        if state.acknowledged != push_id:
            raise WeightSyncError(
                f"engine {engine.rank} will not serve push {push_id} as version {weight_version}: it has not "
                "acknowledged all buckets without a problem since they were loaded"
            )
        if state.is_unpacked:
            report = _ask(engine, "commit_weight_update", push_id)
            _refuse_problems(engine, report, f"cannot serve push {push_id}")
        engine.post("/update_weight_version", {"new_version": weight_version, "abort_all_requests": False})
    engine.unfinished_push = None


def join_weight_group(
    engine: WeightVerbs,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str,
    loader: str = RECEIVER,
) -> None:
    """Join a ``slime.ext.fast_push.channel.WeightChannel`` as ranks ``rank_offset`` and up, and wait for all members.

    Raises:
        WeightSyncError: not all joined within ``--weight-update-timeout-s``.
    """
    if engine.node_rank != 0:
        return
    _state(engine).loader = loader
    group = {
        "master_address": master_address,
        "master_port": master_port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "backend": backend,
    }
    report = _ask(engine, "join_weight_group", None, group_name=group_name, group=group)
    _refuse_problems(engine, report, f"could not join the weight group {group_name}")


def leave_weight_group(engine: WeightVerbs, group_name: str) -> None:
    """Leave the group; not an error if the engine does not know it."""
    if engine.node_rank == 0:
        _ask(engine, "leave_weight_group", None, group_name=group_name)


def run_weight_check(engine: WeightVerbs, loader: str, text: str) -> None:
    """Run a loader that checks the weights on every GPU.

    Raises:
        WeightSyncError: it found problems; the message lists them.
    """
    request = {"serialized_named_tensors": [text] * engine.tp_size, "load_format": loader, "flush_cache": False}
    engine.post("/update_weights_from_tensor", request)
    problems = flatten_reports(engine.post("/get_weights_by_name", {"name": CHECK_REPORT, "truncate_size": 200}))
    if problems:
        raise WeightSyncError(
            f"engine {engine.rank}: {loader.rpartition('.')[2]} found {len(problems)} problems:\n  {shown(problems)}"
        )


def shown(problems: Sequence[str]) -> str:
    """Return the first problems, one per line."""
    more = [f"and {len(problems) - SHOWN_PROBLEMS} more"] if len(problems) > SHOWN_PROBLEMS else []
    return "\n  ".join([*problems[:SHOWN_PROBLEMS], *more])


def _receive(engine: WeightVerbs, push_id: str) -> None:
    _require_push(engine, push_id)
    _state(engine).acknowledged = None


def _send(
    engine: WeightVerbs,
    verb: str,
    push_id: str | None,
    *,
    by_gpu: Sequence[Mapping[str, Any]] | None = None,
    **content: Any,
) -> None:
    """Send a message to the loader on every rank, with each rank's own part of ``by_gpu``."""
    timeout_s = engine.args.weight_update_timeout_s
    message = {"verb": verb, "push_id": push_id, "id": uuid.uuid4().hex, "timeout_s": timeout_s, **content}
    texts = (
        [encode({**message, **own}) for own in by_gpu] if by_gpu is not None else [encode(message)] * engine.tp_size
    )
    request = {"serialized_named_tensors": texts, "flush_cache": False, "load_format": _state(engine).loader}
    engine.post("/update_weights_from_tensor", request)


def _ask(engine: WeightVerbs, verb: str, push_id: str | None, **content: Any) -> dict[str, Any]:
    """Send a message and return the loader's report after it."""
    _send(engine, verb, push_id, **content)
    answer = engine.post("/get_weights_by_name", {"name": PUSH_REPORT})
    try:
        report = json.loads(flatten_reports(answer)[0])
        return {name: report[name] for name in REPORT_FIELDS}
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise EngineError(
            f"engine {engine.rank} answered {verb} with {str(answer)[:200]!r}, which is not a report of its loader"
        ) from error


def _require_push(engine: WeightVerbs, push_id: str) -> None:
    if push_id != engine.unfinished_push:
        known = engine.unfinished_push
        begun = f"last begun: {known}" if known else "none was begun since the last commit"
        raise WeightSyncError(f"engine {engine.rank} is asked about push {push_id}; {begun}")


def _refuse_problems(engine: WeightVerbs, report: Mapping[str, Any], what: str) -> None:
    if report["problems"]:
        raise WeightSyncError(f"engine {engine.rank} {what}: {shown(report['problems'])}")
