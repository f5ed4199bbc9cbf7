"""An engine as seen by the sender of weights: each method sends one request and returns without waiting.

``slime.ray.engines.ray_engine`` sends the requests to the engine's actor, whose methods have the same names
(``slime.backends.sglang_utils.weight_verbs``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Pending(Protocol):
    """A pending request.  Whoever starts one must wait for it with a deadline."""

    def wait(self, timeout_s: float) -> Any:
        """Return the engine's answer.

        Raises:
            ProcessError: the engine refused, died, or did not answer within ``timeout_s`` seconds.
        """


@dataclass(kw_only=True, eq=False)
class EngineProxy(ABC):
    """One engine, which may span several GPUs."""

    index: int
    """Position among the engines that get weights; identifies the engine in messages."""
    num_gpus: int
    """Number of the engine's GPUs, and so of its ranks in a distributed update."""
    gpu_offset: int
    """Index of the engine's first GPU among all GPUs of the job, where trainer rank r has GPU r."""
    is_colocated: bool
    """True if the engine shares :attr:`gpus` with the trainer ranks of the same indices."""
    loaders: tuple[str, ...] = ()
    """Import paths that its server accepts as ``load_format`` (``--custom-weight-loader``)."""
    dtype: str = ""
    """The engine's compute dtype, as named by SGLang; "" means the trainer's."""

    @property
    def gpus(self) -> range:
        """Indices of the engine's GPUs among all GPUs of the job."""
        return range(self.gpu_offset, self.gpu_offset + self.num_gpus)

    @abstractmethod
    def start(self, method: str, /, *arguments: Any, **keywords: Any) -> Pending:
        """Call a method of the engine's actor."""

    @abstractmethod
    def run(self, function: Callable[..., Any], /, *arguments: Any, on_all_nodes: bool = False) -> Pending:
        """Call ``function(actor, *arguments)`` in the engine's actor, for requests that only an extension knows.

        The answer is the first node's; with ``on_all_nodes`` every node of the engine runs the function.
        """

    def pause_generation(self) -> Pending:
        """Abort running requests and stop generating until :meth:`continue_generation`."""
        return self.start("pause_generation")

    def continue_generation(self) -> Pending:
        """Resume serving; an engine with an unfinished push refuses."""
        return self.start("continue_generation")

    def flush_cache(self) -> Pending:
        """Drop the prefix cache, which new weights make stale."""
        return self.start("flush_cache")

    def get_weight_version(self) -> Pending:
        """Return the version of the engine's weights; ``"default"`` before the first update."""
        return self.start("get_weight_version")

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> Pending:
        """Join a process group as ranks ``rank_offset`` and up; rank 0 is the sending trainer."""
        place = master_address, master_port, rank_offset, world_size
        return self.start("init_weights_update_group", *place, group_name, backend)

    def destroy_weights_update_group(self, group_name: str) -> Pending:
        """Leave the group; not an error if the server does not know it (it may have restarted)."""
        return self.start("destroy_weights_update_group", group_name)

    def update_weights_from_tensor(
        self, serialized_named_tensors: list[str], *, load_format: str, weight_version: str | None = None
    ) -> Pending:
        """Load tensors from memory that the engine can map, one serialized payload per GPU.

        If ``load_format`` is one of :attr:`loaders`, that function gets the tensors instead of SGLang's loader.
        """
        what = {"load_format": load_format, "weight_version": weight_version, "flush_cache": False}
        return self.start("update_weights_from_tensor", serialized_named_tensors=serialized_named_tensors, **what)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        weight_version: str,
        load_format: str,
    ) -> Pending:
        """Load tensors that rank 0 of ``group_name`` broadcasts next, in the order of ``names``."""
        what = {"group_name": group_name, "weight_version": weight_version, "load_format": load_format}
        return self.start(
            "update_weights_from_distributed", names=names, dtypes=dtypes, shapes=shapes, flush_cache=False, **what
        )

    def update_weights_from_disk(self, model_path: str, weight_version: str) -> Pending:
        """Load an HF checkpoint folder that the engine's node can read."""
        return self.start("update_weights_from_disk", model_path, weight_version)

    def post_process_weights(
        self, *, restore_weights_before_load: bool = False, post_process_quantization: bool = False
    ) -> Pending:
        """Undo or redo the engine's repacking of quantized weights.  Stock SGLang does not have the endpoint."""
        return self.start("post_process_weights", restore_weights_before_load, post_process_quantization)
