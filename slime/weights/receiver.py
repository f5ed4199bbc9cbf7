"""What a weight sender may ask of an engine.

The trainer pushes weights without knowing what carries its requests: ``slime.ray`` implements this protocol over
actor handles, tests over plain objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ExcludedEngine:
    """An engine that a push left out.  It is paused, serves nothing, and waits to be refilled or dropped."""

    index: int
    """``WeightReceiver.index``."""
    reason: str
    """What it did or failed to do, as the end of a sentence."""


class Pending(Protocol):
    """A request on its way.  Whoever starts one must wait for it, with a deadline."""

    def wait(self, timeout_s: float) -> Any:
        """The engine's answer.

        Raises:
            ProcessError: the engine refused, died, or did not answer within ``timeout_s`` seconds.
        """


class WeightReceiver(Protocol):
    """One engine, which may span several GPUs.

    Every method returns at once with a ``Pending``; nothing is guaranteed to have happened before its ``wait``.
    """

    index: int
    """Position among the engines that get weights; the name of the engine in messages."""
    num_gpus: int
    """GPUs of the engine, the ranks that take part in a distributed update."""
    gpu_offset: int
    """First of them, counted from the start of the rollout slice."""
    is_colocated: bool
    """The engine shares its GPUs with trainer ranks ``gpu_offset .. gpu_offset + num_gpus - 1``."""
    acknowledges: bool
    """Our loader runs in the engine: it takes the verbs of a two-phase push.  Without it, only stock SGLang's."""

    def pause_generation(self) -> Pending:
        """Abort running requests and accept no step until ``continue_generation``."""

    def continue_generation(self) -> Pending: ...

    def flush_cache(self) -> Pending:
        """Drop the prefix cache, which the new weights make stale."""

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> Pending:
        """Join a process group as ranks ``rank_offset ...``; rank 0 is the trainer that sends."""

    def destroy_weights_update_group(self, group_name: str) -> Pending: ...

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str | None,
        weight_version: str | None,
        flush_cache: bool = False,
    ) -> Pending:
        """Load tensors that lie in memory the engine can map: one serialised bucket for each of its GPUs."""

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        weight_version: str,
        load_format: str | None = None,
        flush_cache: bool = False,
    ) -> Pending:
        """Load tensors that rank 0 of ``group_name`` broadcasts next, in this order."""

    def update_weights_from_disk(self, model_path: str, weight_version: str) -> Pending: ...

    # A push in two phases.  ``push_id`` names one attempt at a push; what belongs to another attempt is refused.

    def begin_weight_update(self, manifest_json: str, push_id: str) -> Pending:
        """Prepare for the buckets of a ``Manifest`` and forget any unfinished push.

        The engine checks that it can place every tensor of the manifest and that these fill all its parameters.  From
        here to the commit it holds neither the old nor the new weights: it must refuse ``continue_generation``.
        """

    def receive_weight_bucket(
        self, push_id: str, bucket_index: int, payload: list[str] | None, group_name: str | None
    ) -> Pending:
        """Load one flat bucket; a bucket of this push that was loaded before does no harm.

        Args:
            push_id: of the push begun last.
            bucket_index: position in the manifest's buckets.
            payload: handles to the flat buffer, one for each of the engine's GPUs, when the engine can map it.
            group_name: the group whose rank 0 broadcasts the buffer, otherwise.
        """

    def receive_weight_buckets(self, push_id: str, payloads: dict[int, list[str]]) -> Pending:
        """As ``receive_weight_bucket`` for several buckets at once, which lie on several of the engine's GPUs.

        One request instead of many, and every GPU begins with another bucket, so that not all read one GPU's memory.

        Args:
            push_id: of the push begun last.
            payloads: position in the manifest's buckets -> handles to the flat buffer, one for each GPU.
        """

    def receive_weight_folder(self, push_id: str, folder: str) -> Pending:
        """Load all buckets of the push from the safetensors files in ``folder``, as the engine's hosts see it."""

    def pull_weights(self, target_version: int, rebuild: bool = False) -> Pending:
        """Bring the checkpoint copy of every host of the engine to ``target_version``; ``wait`` gives its folder.

        What the engine serves does not change.  ``rebuild`` makes the copy anew, however good it looks.
        """

    def join_weight_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> Pending:
        """As ``init_weights_update_group``; the group is a ``slime.weights.channel.WeightChannel`` of our loader."""

    def leave_weight_group(self, group_name: str) -> Pending:
        """Leave it; one that the engine does not know is no error."""

    def acknowledge_weight_update(self, push_id: str) -> Pending:
        """``wait`` gives ``{"push_id", "buckets", "problems"}`` for what the engine would serve.

        ``buckets``: digest of each bucket of the manifest as 16 hexadecimal digits (``slime.weights.digest``:
        ``combine`` over the digests of its slices, in the manifest's order), "" for one that did not arrive.
        ``problems``: what keeps the engine from serving these weights, one sentence each, over all its ranks.
        """

    def commit_weight_update(self, push_id: str, weight_version: str) -> Pending:
        """Call the weights of a complete and acknowledged push ``weight_version``; refuse any other push."""

    def get_weight_version(self) -> Pending:
        """``wait`` gives the version string of the weights the engine holds."""

    def check_weights(self, action: str) -> Pending:
        """``action``: ``snapshot``, ``reset_tensors`` or ``compare``."""

    def post_process_weights(self, restore_weights_before_load: bool, post_process_quantization: bool) -> Pending:
        """Undo or redo the engine's own repacking of quantised weights around a push."""
