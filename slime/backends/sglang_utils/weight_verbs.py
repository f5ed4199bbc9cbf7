"""An engine's operations on weights, as requests to its server; ``slime.weights.push.engine`` calls them."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime.utils.errors import ConfigError, EngineError, ProcessError, WeightSyncError

logger = logging.getLogger(__name__)

CHECKS = ("snapshot", "reset_tensors", "compare")
"""Actions of :meth:`WeightVerbs.check_weights`."""


class WeightVerbs:
    """Base class of ``EngineServer``, which sends the requests; each blocks until the server has answered."""

    args: Namespace
    rank: int
    node_rank: int
    tp_size: int = 1
    unfinished_push: str | None = None
    """The last push, if it was started but not completed; while it is set, the engine must not serve."""

    def _request(self, method: str, path: str, payload: Any = None, *, timeout_s: float | None = None) -> Any:
        raise NotImplementedError

    def post(self, path: str, payload: Mapping[str, Any]) -> Any:
        """POST to the server, with the deadline of a push."""
        return self._request("POST", path, dict(payload), timeout_s=self.args.weight_update_timeout_s)

    def run(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Call ``function(self, *arguments)``; extensions use this for their own requests."""
        return function(self, *arguments)

    def refuse_unfinished_push(self) -> None:
        """Raise an error if the engine must not serve requests.

        Raises:
            WeightSyncError: a push was started but not completed.
        """
        if self.unfinished_push is not None:
            raise WeightSyncError(
                f"engine {self.rank} holds the unfinished push {self.unfinished_push} and must not serve; push again, "
                "or restart it"
            )

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group, with the engine's GPUs as ranks ``rank_offset ...``; rank 0 is the sending trainer."""
        place = {"master_address": master_address, "master_port": master_port, "rank_offset": rank_offset}
        group = {"world_size": world_size, "group_name": group_name, "backend": backend}
        self.post("/init_weights_update_group", place | group)

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the group.  It is not an error if the server, after a restart, does not know the group."""
        try:
            self.post("/destroy_weights_update_group", {"group_name": group_name})
        except ProcessError as error:
            logger.info("Group %s was not destroyed on engine %d: %s", group_name, self.rank, error)

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Load tensors from memory that the engine can map, one serialized payload per GPU of the engine."""
        what = {"load_format": load_format, "weight_version": weight_version, "flush_cache": flush_cache}
        self._load("/update_weights_from_tensor", {"serialized_named_tensors": serialized_named_tensors, **what})

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        weight_version: str | None = None,
        load_format: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Load the tensors that rank 0 of ``group_name`` broadcasts next, in this order."""
        headers = {
            "names": list(names),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "shapes": [list(shape) for shape in shapes],
        }
        what = {"group_name": group_name, "weight_version": weight_version, "load_format": load_format}
        self._load("/update_weights_from_distributed", {**headers, **what, "flush_cache": flush_cache})

    def update_weights_from_disk(
        self, model_path: str, weight_version: str | None = None, load_format: str | None = None
    ) -> None:
        """Load an HF checkpoint folder that the engine's node can read."""
        what = {"model_path": model_path, "weight_version": weight_version, "load_format": load_format}
        self._load("/update_weights_from_disk", what)

    def _load(self, path: str, payload: Mapping[str, Any]) -> None:
        """Make the server load weights, which it may serve immediately; arguments that are None are omitted."""
        self.post(path, {name: value for name, value in payload.items() if value is not None})
        self.unfinished_push = None

    def post_process_weights(
        self, restore_weights_before_load: bool = False, post_process_quantization: bool = False
    ) -> None:
        """Undo or redo the engine's repacking of quantized weights.  Stock SGLang does not have this endpoint."""
        undo, redo = restore_weights_before_load, post_process_quantization
        self.post("/post_process_weights", {"restore_weights_before_load": undo, "post_process_quantization": redo})

    def get_weight_version(self) -> str | None:
        """Return the version of the weights that the engine holds; ``"default"`` before the first update."""
        info = self._request("GET", "/model_info")
        if info is not None and not (isinstance(info, dict) and "weight_version" in info):
            raise EngineError(f"engine {self.rank} has no weight_version in /model_info: {str(info)[:200]!r}")
        return None if info is None else info["weight_version"]

    def check_weights(self, action: str) -> None:
        """Take a ``snapshot`` of the weights, overwrite them (``reset_tensors``), or ``compare`` with the snapshot.

        Raises:
            WeightSyncError: ``compare`` found differences.
        """
        if action not in CHECKS:
            raise ConfigError(f"check_weights got the action {action!r}; it knows {', '.join(CHECKS)}")
        try:
            self.post("/weights_checker", {"action": action})
        except ProcessError as error:
            if action == "compare":
                raise WeightSyncError(f"engine {self.rank} differs from its snapshot: {error}") from error
            raise
