"""What a weight sender asks of an engine, as requests to its server.

A push in two phases goes through our loader inside the engine (``weight_receiver``): begin, receive every bucket,
acknowledge, and, when the trainer has compared the digests, commit.  Between begin and commit the engine holds neither
the old nor the new weights and must not serve: it is *fenced*.  The other methods are SGLang's own endpoints.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import uuid
import zlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.loader_message import (
    CHECK_REPORT,
    NOTHING,
    PUSH_REPORT,
    RECEIVER,
    encode,
    flatten_reports,
)
from slime.backends.sglang_utils.server_args import CHECK_LOADERS, WEIGHT_CHECKS
from slime.utils.errors import ConfigError, ProcessError, WeightSyncError
from slime.utils.misc import load_function
from slime.weights.local_copy import LocalCopy

logger = logging.getLogger(__name__)

SHOWN_PROBLEMS = 20


class WeightVerbs:
    """The weight methods of an engine; a base of :class:`SGLangEngine`, which sends the requests."""

    args: Namespace
    rank: int
    node_rank: int
    _tp_size: int = 1
    _push_id: str | None = None
    """Of the push begun last and not committed: while it stands, the engine is fenced."""
    _acknowledged: str | None = None
    """Of the push whose last acknowledgement was complete and named no problem."""
    _num_buckets: int = 0
    """Of the push begun last."""
    _known_manifest: str | None = None
    """What the server's loader was told last, so that it need not travel with every push."""

    def _request(self, method: str, path: str, payload: Any = None, *, timeout_s: float | None = None) -> Any:
        raise NotImplementedError

    def _update(self, path: str, payload: Mapping[str, Any]) -> None:
        self._request("POST", path, dict(payload), timeout_s=self.args.weight_update_timeout_s)

    # --- a push in two phases -------------------------------------------------------------------------------------

    def begin_weight_update(self, manifest_json: str, push_id: str) -> None:
        """Prepare for the buckets of a ``Manifest`` and forget any unfinished push; the engine is fenced from here.

        Raises:
            WeightSyncError: the engine's model has no place for a tensor, or a place that no tensor fills.
        """
        self._push_id, self._acknowledged = push_id, None
        if self.node_rank != 0:
            return
        self._num_buckets = len(json.loads(manifest_json)["buckets"])
        manifest_key = hashlib.sha256(manifest_json.encode()).hexdigest()
        if self._known_manifest == manifest_key:
            report = self._tell("begin", push_id, manifest_key=manifest_key)
            if not report["needs_manifest"]:
                return self._refuse_problems(report, "cannot take this push")
        text = base64.b64encode(zlib.compress(manifest_json.encode(), 1)).decode("ascii")
        report = self._tell("begin", push_id, manifest_key=manifest_key, manifest=text)
        self._refuse_problems(report, "cannot take this push")
        self._known_manifest = manifest_key

    def receive_weight_bucket(
        self, push_id: str, bucket_index: int, payload: Sequence[str] | None, group_name: str | None
    ) -> None:
        """Load one flat bucket.  What is wrong with it is told by :meth:`acknowledge_weight_update`.

        Args:
            push_id: of the push begun last.
            bucket_index: position in the manifest's buckets.
            payload: handles to the flat buffer, one for each of the engine's GPUs, which keep them open until the
                push is acknowledged.
            group_name: the group whose rank 0 broadcasts the buffer, where there is no payload.

        Raises:
            WeightSyncError: another push was begun since, or none.
        """
        if payload is not None:
            return self.receive_weight_buckets(push_id, {bucket_index: payload})
        self._require_push(push_id)
        self._acknowledged = None
        self._tell("receive", push_id, bucket_index=bucket_index, group_name=group_name, reads=False)

    def receive_weight_buckets(self, push_id: str, payloads: Mapping[int, Sequence[str]]) -> None:
        """Load flat buckets that the engine can map, in one request; see :meth:`receive_weight_bucket`.

        Args:
            push_id: of the push begun last.
            payloads: position in the manifest's buckets -> handles to the flat buffer, one for each of the engine's
                GPUs.  GPU ``k`` begins with the ``k``-th bucket.

        Raises:
            WeightSyncError: another push was begun since, or none.
        """
        self._require_push(push_id)
        self._acknowledged = None
        of_gpus = []
        for gpu in range(self._tp_size):
            handles = [(index, handles[gpu]) for index, handles in payloads.items()]
            start = gpu % len(handles)
            of_gpus.append({"payload": handles[start:] + handles[:start]})
        self._tell("receive", push_id, by_gpu=of_gpus, reads=False)

    def receive_weight_folder(self, push_id: str, folder: str) -> None:
        """Load all buckets of the push from the safetensors files in ``folder``, which the engine's hosts can read.

        Raises:
            WeightSyncError: another push was begun since, or none.
        """
        self._require_push(push_id)
        self._acknowledged = None
        if self.node_rank == 0:
            for index in range(self._num_buckets):
                self._tell("receive", push_id, bucket_index=index, folder=folder, group_name=None, reads=False)

    def acknowledge_weight_update(self, push_id: str) -> dict[str, Any]:
        """What the engine would serve: ``{"push_id", "buckets", "problems"}``; see ``WeightReceiver``."""
        self._require_push(push_id)
        if self.node_rank != 0:
            return {"push_id": push_id, "buckets": [], "problems": []}
        report = self._tell("acknowledge", push_id)
        if report["push_id"] != push_id:
            raise WeightSyncError(
                f"engine {self.rank} was asked about push {push_id}, but its loader knows {report['push_id']!r}; "
                "was its server restarted? Begin the push again"
            )
        is_complete = all(report["buckets"]) and not report["problems"]
        self._acknowledged = push_id if is_complete else None
        return {key: report[key] for key in ("push_id", "buckets", "problems")}

    def commit_weight_update(self, push_id: str, weight_version: str) -> None:
        """Serve the push as ``weight_version``; it must be complete and acknowledged.  Ends the fence.

        Raises:
            WeightSyncError: it is not; the version stays what it was.
        """
        self._require_push(push_id)
        if self.node_rank == 0:
            if self._acknowledged != push_id:
                raise WeightSyncError(
                    f"engine {self.rank} will not serve push {push_id} as version {weight_version}: it has not "
                    "acknowledged all buckets without a problem since they were loaded"
                )
            self._update("/update_weight_version", {"new_version": weight_version, "abort_all_requests": False})
        self._push_id = None

    def join_weight_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the group over which buckets are broadcast (a ``WeightChannel``); blocks until all have joined.

        Raises:
            WeightSyncError: not all joined within ``--weight-update-timeout-s``.
        """
        if self.node_rank != 0:
            return
        group = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "backend": backend,
        }
        report = self._tell("join", None, group_name=group_name, group=group)
        self._refuse_problems(report, f"could not join the weight group {group_name}")

    def leave_weight_group(self, group_name: str) -> None:
        """Leave the group; one that the engine does not know is no error."""
        if self.node_rank == 0:
            self._tell("leave", None, group_name=group_name)

    def _tell(
        self,
        verb: str,
        push_id: str | None,
        *,
        by_gpu: Sequence[Mapping[str, Any]] | None = None,
        reads: bool = True,
        **content: Any,
    ) -> dict[str, Any]:
        """Send a message to the loader on every rank, with what each is told beside it in ``by_gpu``.

        With ``reads`` give the engine's state after it.
        """
        timeout_s = self.args.weight_update_timeout_s
        message = {"verb": verb, "push_id": push_id, "id": uuid.uuid4().hex, "timeout_s": timeout_s, **content}
        texts = (
            [encode({**message, **own}) for own in by_gpu] if by_gpu is not None else [encode(message)] * self._tp_size
        )
        request = {"serialized_named_tensors": texts, "flush_cache": False, "load_format": RECEIVER}
        self._update("/update_weights_from_tensor", request)
        if not reads:
            return {}
        answer = self._request(
            "POST", "/get_weights_by_name", {"name": PUSH_REPORT}, timeout_s=self.args.weight_update_timeout_s
        )
        return json.loads(flatten_reports(answer)[0])

    def _require_push(self, push_id: str) -> None:
        if push_id != self._push_id:
            begun = f"last begun: {self._push_id}" if self._push_id else "none was begun since the last commit"
            raise WeightSyncError(f"engine {self.rank} is asked about push {push_id}; {begun}")

    def _refuse_problems(self, report: Mapping[str, Any], what: str) -> None:
        if report["problems"]:
            raise WeightSyncError(f"engine {self.rank} {what}: {_shown(report['problems'])}")

    def _refuse_fenced(self) -> None:
        """For what would serve requests.

        Raises:
            WeightSyncError: a push was begun and not committed.
        """
        if self._push_id is not None:
            raise WeightSyncError(
                f"engine {self.rank} holds the unfinished push {self._push_id} and must not serve; push again, or "
                "restart it"
            )

    # --- SGLang's own endpoints -----------------------------------------------------------------------------------

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the process group over which updates are broadcast; blocks until all its ranks have."""
        payload = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._update("/init_weights_update_group", payload)

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave the group; one that the server does not know (it may have been restarted) is no error."""
        try:
            self._update("/destroy_weights_update_group", {"group_name": group_name})
        except ProcessError as error:
            logger.info("group %s was not destroyed on engine %d: %s", group_name, self.rank, error)

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Load tensors from shared (CUDA IPC) memory: one serialised payload for each of the engine's GPUs.

        With ``load_format`` one of ``weight_check``'s functions the tensors are compared instead.

        Raises:
            WeightSyncError: the comparison found differences; the message names the tensors.
        """
        payload: dict[str, Any] = {"serialized_named_tensors": serialized_named_tensors, "flush_cache": flush_cache}
        self._update("/update_weights_from_tensor", _with_given(payload, load_format, weight_version))
        if load_format in WEIGHT_CHECKS:
            self._raise_problems(load_format)
        else:
            self._push_id = None

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
        """Load tensors that rank 0 of ``group_name`` broadcasts, in this order."""
        payload: dict[str, Any] = {
            "names": list(names),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": flush_cache,
        }
        self._update("/update_weights_from_distributed", _with_given(payload, load_format, weight_version))
        self._push_id = None

    def update_weights_from_disk(
        self, model_path: str, weight_version: str | None = None, load_format: str | None = None
    ) -> None:
        """Load an HF checkpoint folder that the engine's node can read."""
        payload = {"model_path": model_path}
        self._update("/update_weights_from_disk", _with_given(payload, load_format, weight_version))
        self._push_id = None

    def get_weight_version(self) -> str | None:
        """The version string that came with the last update; ``"default"`` before the first."""
        info = self._request("GET", "/model_info")
        return None if info is None else info["weight_version"]

    def check_weights(self, action: str) -> None:
        """``snapshot`` the weights, ``reset_tensors`` (overwrite them), or ``compare`` them with the snapshot.

        Raises:
            WeightSyncError: ``compare`` found differences.
        """
        if action not in CHECK_LOADERS:
            raise ConfigError(f"check_weights got the action {action!r}; it knows {', '.join(CHECK_LOADERS)}")
        if cpu_shim.is_needed():
            self.update_weights_from_tensor([NOTHING] * self._tp_size, load_format=CHECK_LOADERS[action])
            return
        try:
            self._update("/weights_checker", {"action": action})
        except ProcessError as error:
            if action == "compare":
                raise WeightSyncError(f"engine {self.rank} differs from its snapshot: {error}") from error
            raise

    def post_process_weights(
        self, restore_weights_before_load: bool = False, post_process_quantization: bool = False
    ) -> None:
        """Undo or redo the engine's own repacking of quantised weights (needs a patched SGLang)."""
        self._update(
            "/post_process_weights",
            {
                "restore_weights_before_load": restore_weights_before_load,
                "post_process_quantization": post_process_quantization,
            },
        )

    def pull_weights(self, target_version: int, rebuild: bool = False) -> str:
        """Bring this host's copy of the checkpoint to ``target_version`` and give its folder; on every node.

        It happens in this process, which runs on the engine's host: stock SGLang has no endpoint for it.  The engine
        goes on serving what it serves.

        Args:
            target_version: a version in ``--update-weight-disk-dir``; 0 is ``--hf-checkpoint`` itself.
            rebuild: make the copy anew even if it seems good.

        Raises:
            WeightSyncError: the version cannot be reached, or its bytes are not what their checksums say.
        """
        args = self.args
        if args.sglang_custom_pull_weights_pre_read_hook is not None and target_version > 0:
            load_function(args.sglang_custom_pull_weights_pre_read_hook)(args.update_weight_disk_dir, target_version)
        copy = LocalCopy(
            args.update_weight_local_checkpoint_dir,
            source=args.update_weight_disk_dir,
            model=args.hf_checkpoint,
            timeout_s=args.weight_update_timeout_s,
        )
        copy.pull(target_version, rebuild=rebuild)
        return str(copy.folder)

    def _raise_problems(self, check: str) -> None:
        problems = flatten_reports(
            self._request("POST", "/get_weights_by_name", {"name": CHECK_REPORT, "truncate_size": 200})
        )
        if problems:
            raise WeightSyncError(
                f"engine {self.rank}: {check.rpartition('.')[2]} found {len(problems)} problems:\n  {_shown(problems)}"
            )


def _shown(problems: Sequence[str]) -> str:
    more = [f"and {len(problems) - SHOWN_PROBLEMS} more"] if len(problems) > SHOWN_PROBLEMS else []
    return "\n  ".join([*problems[:SHOWN_PROBLEMS], *more])


def _with_given(payload: dict[str, Any], load_format: str | None, weight_version: str | None) -> dict[str, Any]:
    optional = {"load_format": load_format, "weight_version": weight_version}
    return payload | {key: value for key, value in optional.items() if value is not None}
