"""slime's weight loader, which runs inside the engine: takes the buckets of a push and verifies what it has loaded.

SGLang calls :func:`receive` on every rank for each ``/update_weights_from_tensor`` that names it as ``load_format``,
once per model object: with speculative decoding, first for the draft model, then for the target.  Work of the process
(mapping a buffer, receiving a broadcast, digests) is done in the first call, work of a model in each; a message's
``id`` tells repeated calls from new messages.

A bucket's digest is computed from the bytes that arrived.  After each load the device checks that the model holds
these bytes, after the engine's own casts (``ModelLoad``).  The acknowledgement combines both.
"""

from __future__ import annotations

import base64
import gc
import json
import logging
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slime.ext.fast_push.bucket_shares import EngineShares
from slime.ext.fast_push.incoming import IncomingBytes
from slime.ext.fast_push.load_plan import LoadPlan
from slime.ext.fast_push.loader_report import (
    answer_by_name,
    gather_over_ranks,
    position_among_ranks,
    with_ranks,
)
from slime.ext.fast_push.manifest import BucketEntry, Manifest
from slime.ext.fast_push.messages import PUSH_REPORT, decode
from slime.ext.fast_push.model_load import ModelLoad
from slime.ext.fast_push.repacked_layers import is_unpacked
from slime.observability.telemetry import DeviceTimes
from slime.utils.errors import WeightSyncError

logger = logging.getLogger(__name__)

MAX_UNUSED_SHOWN = 5
VERBS = frozenset(
    {
        "begin_weight_update",
        "receive_weight_bucket",
        "receive_weight_buckets",
        "receive_weight_folder",
        "acknowledge_weight_update",
        "commit_weight_update",
        "join_weight_group",
        "leave_weight_group",
    }
)
"""The messages sent by ``engine_verbs``."""


def receive(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Handle the messages carried by ``named_tensors`` (see ``messages``)."""
    answer_by_name(model, PUSH_REPORT, _RANK.report)
    for message in decode(named_tensors):
        try:
            _RANK.handle(model, message)
        except Exception as error:  # an exception must not reach the scheduler, which it would end
            logger.exception("The weight receiver failed at %s", message["verb"])
            _RANK.record(message, error)


class ReceivingRank:
    """State of the current push in one process of an engine; each message of ``engine_verbs`` is a method here."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._shares: EngineShares | None = None
        """Shares of the manifest of the push begun last; None if the manifest is unknown."""
        self._push_id: str | None = None
        self._incoming = IncomingBytes()
        self._problems: list[str] = []
        """Problems of the push that belong to no model."""
        self._message_problems: list[str] = []
        """Problems of the last message, if it belongs to no push."""
        self._message_id = ""
        self._flat: Tensor | None = None
        """The bucket of the last message; None if it had been loaded before."""
        self._times = DeviceTimes()
        """Device times of the current push."""

    def handle(self, model: nn.Module, message: dict[str, Any]) -> None:
        """Handle a message for one model; its ``verb`` names the method."""
        is_first = message["id"] != self._message_id
        if is_first:
            self._message_id, self._message_problems, self._flat = message["id"], [], None
        if message["verb"] not in VERBS:
            raise WeightSyncError(f"the weight loader knows no verb {message['verb']!r}; it knows {', '.join(VERBS)}")
        getattr(self, message["verb"])(model, message, is_first)

    def begin_weight_update(self, model: nn.Module, message: dict[str, Any], is_first: bool) -> None:
        """Start the push (in the first call) and the load of ``model`` with the push's manifest."""
        if is_first:
            self._push_id, self._problems, self._times = message["push_id"], [], DeviceTimes()
            self._incoming.begin()
            if self._shares is None or self._shares.manifest.id != message["manifest_id"]:
                self._shares = None  # stays None if the message does not include the manifest
                self._shares = _shares_of(message)
            if self._shares is not None:
                self._shares.begin()
        if self._shares is not None:
            self._load_of(model).begin(self._shares.manifest)

    def receive_weight_buckets(self, model: nn.Module, message: dict[str, Any], is_first: bool) -> None:
        """Load buckets that arrive as handles to a trainer rank's memory."""
        self._require_push(message["push_id"])
        for index, handle in message["payload"]:
            self._take(model, index, handle)
        _wait_for_device()

    def receive_weight_bucket(self, model: nn.Module, message: dict[str, Any], is_first: bool) -> None:
        """Load a bucket from a folder or a broadcast; the first call fetches its bytes."""
        if is_first:
            self._flat = self._obtain(model, message)
        if self._flat is not None:
            self._load(model, message["bucket_index"], self._flat)
            _wait_for_device()

    receive_weight_folder = receive_weight_bucket

    def acknowledge_weight_update(self, model: nn.Module, message: dict[str, Any], is_first: bool) -> None:
        self._require_push(message["push_id"])
        self._incoming.release()
        self._flat = None
        self._load_of(model).finish()

    def commit_weight_update(self, model: nn.Module, message: dict[str, Any], is_first: bool) -> None:
        self._require_push(message["push_id"])
        self._load_of(model).commit()
        _wait_for_device()

    def join_weight_group(self, model: nn.Module, message: dict[str, Any], is_first: bool) -> None:
        if is_first:
            self._incoming.join(message["group_name"], message["group"], message["timeout_s"])

    def leave_weight_group(self, model: nn.Module, message: dict[str, Any], is_first: bool) -> None:
        self._incoming.leave(message["group_name"])

    def record(self, message: dict[str, Any], error: Exception) -> None:
        what = "" if isinstance(error, WeightSyncError) else f" failed: {type(error).__name__}"
        problem = f"{message['verb']}{what}: {error}"
        is_of_push = message["push_id"] is not None and message["push_id"] == self._push_id
        (self._problems if is_of_push else self._message_problems).append(problem)

    def report(self) -> list[str]:
        """Return the state of the push over all ranks as one JSON text; every rank must call this."""
        shares, loads = self._shares, [self._load_of(model) for model in self._models]
        problems = [
            *self._message_problems,
            *self._problems,
            *(problem for load in loads for problem in load.problems),
        ]
        problems += unfilled([(load.model, load.plan) for load in loads if load.plan is not None])
        digests = {} if shares is None else shares.digests
        own: dict[str, Any] = {
            "push_id": self._push_id,
            "manifest_id": None if shares is None else shares.manifest.id,
            "taken": None if shares is None else shares.newly_taken(loads, position_among_ranks()),
            "digests": {index: found.cpu().numpy().tobytes() for index, found in digests.items()},
            "holds_constants": all(load.holds_constants for load in loads),
            "problems": problems,
            "is_unpacked": any(is_unpacked(load.model) for load in loads),
            "seconds": self._times.seconds(),
        }
        ranks = gather_over_ranks(own)
        told: dict[str, Any] = {
            "push_id": own["push_id"],
            "needs_manifest": shares is None or any(rank["manifest_id"] != own["manifest_id"] for rank in ranks),
            "buckets": [],
            "problems": with_ranks([rank["problems"] for rank in ranks]),
            "is_unpacked": any(rank["is_unpacked"] for rank in ranks),
            "seconds": {
                name: max(rank["seconds"].get(name, 0.0) for rank in ranks)
                for rank in ranks
                for name in rank["seconds"]
            },
        }
        for index, rank in enumerate(ranks):
            if rank["push_id"] != own["push_id"]:
                told["problems"].append(f"rank {index} knows push {rank['push_id']}, rank 0 {ranks[0]['push_id']}")
        if shares is not None and not told["needs_manifest"]:
            shares.deal([rank["taken"] for rank in ranks])
            texts, differing = shares.merge([rank["digests"] for rank in ranks])
            told["problems"] += differing
            told["buckets"] = shares.with_constants(
                texts,
                are_held=all(rank["holds_constants"] for rank in ranks),
                are_right=not told["problems"],
            )
        return [json.dumps(told)]

    # --- what the verbs are made of -------------------------------------------------------------------------------

    def _obtain(self, model: nn.Module, message: dict[str, Any]) -> Tensor | None:
        """Fetch the bytes of a bucket from a folder or a broadcast; None if it was loaded before."""
        index, device = message["bucket_index"], device_of(model)
        try:
            self._require_push(message["push_id"])
            shares = self._known_shares()
            bucket, manifest = shares.bucket(index), shares.manifest
            if message.get("folder") is not None:
                positions = shares.positions(position_among_ranks(), index)
                flat = self._incoming.read(message["push_id"], message["folder"], bucket, manifest, positions)
                flat = flat.to(device, non_blocking=True)
            else:
                flat = self._incoming.receive(message["group_name"], bucket, manifest, device, message["timeout_s"])
        except Exception:
            self._incoming.abandon(message.get("group_name") or "")
            raise
        if index in shares.digests:
            return None
        self._digest(index, flat)
        return flat

    def _take(self, model: nn.Module, index: int, handle: str) -> None:
        """Load a bucket that this process can map, unless this model has already loaded it."""
        shares, device = self._known_shares(), device_of(model)
        bucket = shares.bucket(index)
        if self._load_of(model).has(index):
            return
        flat = torch.empty(0, dtype=torch.uint8, device=device)
        if ranges := shares.share(position_among_ranks(), index, device).ranges:
            flat = self._incoming.map(handle)
            _require_room(flat, index, bucket)
            flat = flat[: bucket.num_bytes]
            if flat.device != device:
                with self._times.span("copy", device):
                    flat = self._incoming.copy(flat, ranges, shares.manifest, device)
            self._digest(index, flat)
        self._load(model, index, flat)

    def _digest(self, index: int, flat: Tensor) -> None:
        with self._times.span("digest", flat.device):
            self._known_shares().digest(position_among_ranks(), index, flat)

    def _load(self, model: nn.Module, index: int, flat: Tensor) -> None:
        with self._times.span("place", flat.device):
            self._load_of(model).load(index, flat)

    # --- what is known --------------------------------------------------------------------------------------------

    def _load_of(self, model: nn.Module) -> ModelLoad:
        state = vars(model)
        if "_slime_load" not in state:
            state["_slime_load"] = ModelLoad(model)
            self._models.add(model)
        return state["_slime_load"]

    def _known_shares(self) -> EngineShares:
        if self._shares is None:
            raise WeightSyncError("no manifest is known; call begin_weight_update first")
        return self._shares

    def _require_push(self, push_id: str) -> None:
        if push_id != self._push_id:
            raise WeightSyncError(f"push {push_id} is not the one that was begun last, {self._push_id}")


def _shares_of(message: dict[str, Any]) -> EngineShares | None:
    """Return the shares of the message's manifest; None if it has only the manifest's id."""
    if "manifest" not in message:
        return None
    gc.collect()
    gc.freeze()  # otherwise collections traverse the whole model several times while manifest and plan are made
    manifest = Manifest.from_json(zlib.decompress(base64.b64decode(message["manifest"])).decode())
    if manifest.id != message["manifest_id"]:
        raise WeightSyncError(f"manifest {message['manifest_id']} came with the content of {manifest.id}")
    return EngineShares(manifest)


def unfilled(planned: Sequence[tuple[nn.Module, LoadPlan]]) -> list[str]:
    """Return one sentence per parameter that no tensor of the push fills, over all models of the process."""
    found = []
    for model, plan in planned:
        others = set().union(*(other.written_memory for _, other in planned if other is not plan))
        for name, sentence in plan.unwritten.items():
            # A draft model may share its embedding with the target, which loads it.
            if model.get_parameter(name).untyped_storage().data_ptr() not in others:
                found.append(sentence)
    unused = frozenset.intersection(*(plan.unused for _, plan in planned)) if planned else frozenset()
    if found and unused:
        shown = ", ".join(sorted(unused)[:MAX_UNUSED_SHOWN])
        found.append(f"the engine has no place for {len(unused)} tensors of the push: {shown}")
    return found


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters."""
    return next(model.parameters()).device


def _require_room(flat: Tensor, index: int, bucket: BucketEntry) -> None:
    if flat.dtype != torch.uint8 or flat.dim() != 1 or flat.numel() < bucket.num_bytes:
        raise WeightSyncError(
            f"bucket {index} has {bucket.num_bytes} bytes; its buffer is {list(flat.shape)} of {flat.dtype}"
        )


def _wait_for_device() -> None:
    """Synchronize with the device, because the trainer overwrites the buffer as soon as the request is answered."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


_RANK = ReceivingRank()
"""This process's rank of the engine."""
