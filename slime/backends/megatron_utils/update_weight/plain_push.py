"""The plain push: whole tensors, bucket by bucket, through SGLang's own endpoints.

    pause -> every bucket: gather, rename, quantize, send -> same version everywhere -> continue

See also ``gather`` (shards to whole tensors, which ``megatron_to_hf`` renames), ``sglang`` (its format of a bucket),
``engine_group`` (broadcasts), and for the engine's side ``slime.backends.sglang_utils.weight_verbs``.

Nothing is verified, and no engine is excluded.  If one fails, the push fails and names it, and all engines stay
paused, because they may hold a mix of old and new weights.  The verified push, an extension, continues without that
engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.update_weight.engine_group import EngineGroup
from slime.backends.megatron_utils.update_weight.transport import SentWeights, Transport
from slime.utils.errors import WeightSyncError
from slime.weights.buckets import iter_units
from slime.weights.named_tensors import NamedTensors
from slime.weights.push.engine import EngineProxy
from slime.weights.push.participants import PUSH_FAILURES
from slime.weights.push.state import Push, PushReport, TrainerRanks
from slime.weights.push.wire import FLATTENED_BUCKET

logger = logging.getLogger(__name__)


class PlainPush(Transport):
    """Rank 0 broadcasts to remote engines; each rank shares its buckets with the engine on its GPU."""

    def __init__(self, ranks: TrainerRanks) -> None:
        self._ranks = ranks
        self._has_colocated = False
        """Some engine uses some rank's GPU; the same value on all ranks."""
        self._shares_gpu = False
        """An engine uses this rank's GPU, and maps the rank's buckets."""
        self._beside: list[EngineProxy] = []
        """Engines whose first GPU is this rank's; this rank requests their loads."""
        self._remote: list[EngineProxy] = []
        """On rank 0: engines on other GPUs, which get the buckets by broadcast."""
        self._group = EngineGroup("slime")
        self._weights: SentWeights | None = None

    def connect(self, engines: Sequence[EngineProxy], weights: SentWeights) -> None:
        """Connect to ``engines``, and determine which of them share a GPU with a rank."""
        colocated = [e for e in engines if e.is_colocated and e.gpus.stop <= self._ranks.world_size]
        rank, self._has_colocated = self._ranks.rank, bool(colocated)
        self._shares_gpu = any(rank in engine.gpus for engine in colocated)
        self._beside = [engine for engine in colocated if engine.gpu_offset == rank]
        self._remote = [e for e in engines if e not in colocated] if self._ranks.rank == 0 else []
        self._weights = weights
        sglang.prepare()

    def send(self, push: Push) -> PushReport:
        """Push the weights; if any engine fails, the push fails on all ranks.

        After an error the engines are paused, and some may hold a mix of old and new weights.

        Raises:
            WeightSyncError: an engine or a rank failed; raised on every rank.
            SlimeError, RuntimeError: gathering, renaming or quantizing a tensor failed; raised immediately and only on
                that rank, while the others wait in the next collective until the job ends them.
        """
        engines = list(push.participants.engines.values())
        if push.checks:
            raise WeightSyncError("--check-weight-update-equal needs --weight-push verified and slime's weight loader")
        if push.repacks:
            self._on_main_rank(push, "asking for a push's needs", lambda: push.require_repacking(engines))
        with push.step("pause"):
            self._on_main_rank(push, "pausing the engines", push.pause)
            if push.repacks:
                self._on_main_rank(push, "undoing repacking", lambda: push.undo_repacking(engines))
        with push.step("buckets"):
            self._on_main_rank(push, "joining the engines", lambda: self._group.form(self._remote, push.participants))
            sent = self._send_buckets(push)
        with push.step("commit"):
            if push.repacks:
                self._on_main_rank(push, "repacking", lambda: push.repack(engines))
            self._on_main_rank(push, "asking for versions", push.require_version)
        with push.step("continue"):
            self._on_main_rank(push, "letting the engines continue", push.continue_generation)
        report = push.report(
            num_tensors=sum(map(len, sent)), num_buckets=len(sent), num_bytes=sum(sum(sizes) for sizes in sent)
        )
        if self._ranks.rank == 0:
            logger.log(
                push.log_level,
                "Pushed weight version %s to %d engines, unverified: %d tensors, %.1f MiB in %d buckets, %.2f s.",
                push.version, report.num_engines, report.num_tensors, report.num_bytes / 2**20, report.num_buckets,
                report.elapsed_s,
            )  # fmt: skip
        return report

    def close(self) -> None:
        """Leave the group with the engines."""
        self._group.leave()

    @torch.no_grad()
    def _send_buckets(self, push: Push) -> list[list[int]]:
        """Send every bucket; return the bytes of each tensor, per bucket.

        A rank that has failed sends nothing, but takes part in the collectives until the last bucket.
        """
        assert self._weights is not None
        sent = []
        for bucket in iter_buckets(self._weights):
            sent.append([tensor.nbytes for _, tensor in bucket])
            handle, buffer = self._share(push, bucket)
            handles = self._ranks.gather(handle) if self._has_colocated else []
            if _is_whole(push):
                try:
                    self._hand_over(push, handles)
                    self._group.broadcast(bucket, push.version, push.participants)
                except PUSH_FAILURES as error:
                    push.failures.append(error)
            if self._has_colocated:
                self._ranks.gather(None)  # from here on no engine maps the buffers
            del buffer, bucket  # before the next one is gathered
        push.meet(f"sending the tensors of version {push.version}")
        _require_all(push)
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # frees memory that engines have unmapped
        return sent

    def _share(self, push: Push, bucket: NamedTensors) -> tuple[str, torch.Tensor | None]:
        """Copy the bucket for the engine on this rank's GPU; return a handle (CUDA IPC, or shared memory on a CPU) and
        the copy.  The handle is "" and the copy None if no engine maps it or this rank has failed.
        """
        if not self._shares_gpu or not _is_whole(push):
            return "", None
        try:
            return sglang.serialize_bucket(bucket)
        except PUSH_FAILURES as error:
            push.failures.append(error)
            return "", None

    def _hand_over(self, push: Push, handles: list[str]) -> None:
        """Make the engines whose first GPU is this rank's load a bucket; each of their GPUs maps its rank's copy."""
        of_engines = {e.index: [handles[gpu] for gpu in e.gpus] for e in self._beside}
        if any("" in own for own in of_engines.values()):
            return  # a rank has failed, which ends the push at the next ``meet``
        push.participants.ask(
            "loading a bucket",
            lambda engine: engine.update_weights_from_tensor(
                of_engines[engine.index], load_format=FLATTENED_BUCKET, weight_version=push.version
            ),
            self._beside,
        )

    def _on_main_rank(self, push: Push, what: str, action: Callable[[], None]) -> None:
        push.on_main_rank(what, action)
        _require_all(push)


def iter_buckets(weights: SentWeights) -> Iterator[NamedTensors]:
    """Yield all tensors in the form that engines load, in buckets of at most ``bucket_bytes``.

    Tensors that an engine must load together are in one bucket; such a unit that is larger has its own bucket.
    Collective; every rank gets all tensors.
    """
    weight_map, dims = weights.form.weight_map, weights.form.dims
    bucket: NamedTensors = []
    size = 0
    whole = weights.whole_tensors(across_stages=True)
    for unit in iter_units(whole, lambda name: weight_map.together_with(name, dims)):
        tensors = [sent for name, tensor in unit for sent in weights.as_sent(name, tensor)]
        added = sum(tensor.nbytes for _, tensor in tensors)
        if bucket and size + added > weights.bucket_bytes:
            yield _widest_first(bucket)
            bucket, size = [], 0
        bucket += tensors
        size += added
    if bucket:
        yield _widest_first(bucket)


def _widest_first(bucket: NamedTensors) -> NamedTensors:
    """Sort a bucket such that each tensor is aligned to its dtype in the concatenated bytes."""
    return sorted(bucket, key=lambda named: -named[1].element_size())


def _is_whole(push: Push) -> bool:
    """Return True if this rank knows of no failure in the push."""
    return not push.failures and not push.participants.reasons


def _require_all(push: Push) -> None:
    """Raise an error if an engine was excluded; all ranks know the same excluded engines.

    Raises:
        WeightSyncError: lists the engines and their errors.
    """
    if failed := push.participants.excluded:
        listed = "; ".join(f"engine {engine.index}: {engine.reason}" for engine in failed)
        raise WeightSyncError(
            f"weight version {push.version} was not pushed, and all engines stay paused, because of {listed}"
        )
