"""The verbs of an engine (``slime.weights.push.verbs``), as requests to its server.

A push in two phases goes through our loader inside the engine (``weight_receiver``): a verb becomes a message of the
same name.  The others are SGLang's own endpoints, to which ``post_endpoints`` leads the arguments as they are.
"""

from __future__ import annotations

import base64
import json
import logging
import uuid
import zlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.server_control import NoAnswer
from slime.utils.errors import ConfigError, EngineError, ProcessError, WeightSyncError
from slime.utils.misc import load_function
from slime.utils.plugins import PluginCall, call_plugin
from slime.weights.local_copy import LocalCopy
from slime.weights.push.adapter import ADAPTER_PREFIX, IN_ONE_BUFFER
from slime.weights.push.verbs import (
    COMPARE_SNAPSHOT,
    FILL_WITH_NAN,
    RECEIVER,
    SNAPSHOT,
    VERBS,
    WEIGHT_CHECKS,
    EngineVerbs,
    Verb,
    post_endpoints,
)
from slime.weights.push.wire import CHECK_REPORT, NOTHING, PUSH_REPORT, encode, flatten_reports

logger = logging.getLogger(__name__)

SHOWN_PROBLEMS = 20
REPORT_FIELDS = ("push_id", "needs_manifest", "buckets", "problems", "is_unpacked", "seconds")
"""Of what the loader answers after each message."""
CHECK_LOADERS = {"snapshot": SNAPSHOT, "reset_tensors": FILL_WITH_NAN, "compare": COMPARE_SNAPSHOT}
"""The loaders behind ``check_weights`` on a CPU, where SGLang's own ``/weights_checker`` wants CUDA."""


@post_endpoints
class WeightVerbs(EngineVerbs):
    """The weight verbs of an engine; a base of :class:`SGLangEngine`, which sends the requests."""

    args: Namespace
    rank: int
    node_rank: int
    _tp_size: int = 1
    _push_id: str | None = None
    """Of the push begun last and not committed: while it is set, the engine must not serve."""
    _acknowledged: str | None = None
    """Of the push whose last acknowledgement was complete and named no problem."""
    _is_unpacked: bool = False
    """Its model has layers that must be repacked before it serves."""
    _num_buckets: int = 0
    """Of the push begun last."""
    _adapter: str | None = None
    """Name of the adapter that the server runs requests with."""
    _unloading: Future[None] | None = None
    """The end of the one before, which waits for its requests."""

    def _request(self, method: str, path: str, payload: Any = None, *, timeout_s: float | None = None) -> Any:
        raise NotImplementedError

    def _update(self, path: str, payload: Mapping[str, Any]) -> None:
        self._request("POST", path, dict(payload), timeout_s=self.args.weight_update_timeout_s)

    # A push in two phases

    def begin_weight_update(
        self, manifest_id: str, push_id: str, manifest_json: str | None = None
    ) -> list[str] | None:
        self._push_id, self._acknowledged = push_id, None
        if self.node_rank != 0:
            return []
        content = {"manifest_id": manifest_id}
        if manifest_json is not None:
            content["manifest"] = base64.b64encode(zlib.compress(manifest_json.encode(), 1)).decode("ascii")
        report = self._ask_loader("begin_weight_update", push_id, **content)
        if report["needs_manifest"] and manifest_json is None:
            return None
        self._refuse_problems(report, "cannot take this push")
        held: list[str] = report["buckets"]
        self._num_buckets = len(held)
        return held

    def receive_weight_bucket(self, push_id: str, bucket_index: int, group_name: str) -> None:
        self._require_push(push_id)
        self._acknowledged = None
        self._send_to_loader("receive_weight_bucket", push_id, bucket_index=bucket_index, group_name=group_name)

    def receive_weight_buckets(self, push_id: str, payloads: Mapping[int, Sequence[str]]) -> None:
        self._require_push(push_id)
        self._acknowledged = None
        by_gpu = []
        for gpu in range(self._tp_size):
            handles = [(index, handles[gpu]) for index, handles in payloads.items()]
            start = gpu % len(handles)
            by_gpu.append({"payload": handles[start:] + handles[:start]})
        self._send_to_loader("receive_weight_buckets", push_id, by_gpu=by_gpu)

    def receive_weight_folder(self, push_id: str, folder: str) -> None:
        self._require_push(push_id)
        self._acknowledged = None
        for index in range(self._num_buckets):
            self._send_to_loader("receive_weight_folder", push_id, bucket_index=index, folder=folder)

    def acknowledge_weight_update(self, push_id: str) -> dict[str, Any]:
        self._require_push(push_id)
        if self.node_rank != 0:
            return {"push_id": push_id, "buckets": [], "problems": [], "seconds": {}}
        report = self._ask_loader("acknowledge_weight_update", push_id)
        if report["push_id"] != push_id:
            raise WeightSyncError(
                f"engine {self.rank} was asked about push {push_id}, but its loader knows {report['push_id']!r}; "
                "was its server restarted? Begin the push again"
            )
        is_complete = all(report["buckets"]) and not report["problems"]
        self._acknowledged = push_id if is_complete else None
        self._is_unpacked = report["is_unpacked"]
        return {name: report[name] for name in ("push_id", "buckets", "problems", "seconds")}

    def commit_weight_update(self, push_id: str, weight_version: str) -> None:
        self._require_push(push_id)
        if self.node_rank == 0:
            if self._acknowledged != push_id:
                raise WeightSyncError(
                    f"engine {self.rank} will not serve push {push_id} as version {weight_version}: it has not "
                    "acknowledged all buckets without a problem since they were loaded"
                )
            if self._is_unpacked:
                report = self._ask_loader("commit_weight_update", push_id)
                self._refuse_problems(report, f"cannot serve push {push_id}")
            self._update("/update_weight_version", {"new_version": weight_version, "abort_all_requests": False})
        self._push_id = None

    def join_weight_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        if self.node_rank != 0:
            return
        group = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "backend": backend,
        }
        report = self._ask_loader("join_weight_group", None, group_name=group_name, group=group)
        self._refuse_problems(report, f"could not join the weight group {group_name}")

    def leave_weight_group(self, group_name: str) -> None:
        if self.node_rank == 0:
            self._ask_loader("leave_weight_group", None, group_name=group_name)

    def _send_to_loader(
        self, verb: str, push_id: str | None, *, by_gpu: Sequence[Mapping[str, Any]] | None = None, **content: Any
    ) -> None:
        """Send a message to the loader on every rank, with what each is told beside it in ``by_gpu``."""
        timeout_s = self.args.weight_update_timeout_s
        message = {"verb": verb, "push_id": push_id, "id": uuid.uuid4().hex, "timeout_s": timeout_s, **content}
        texts = (
            [encode({**message, **own}) for own in by_gpu] if by_gpu is not None else [encode(message)] * self._tp_size
        )
        request = {"serialized_named_tensors": texts, "flush_cache": False, "load_format": RECEIVER}
        self._update("/update_weights_from_tensor", request)

    def _ask_loader(self, verb: str, push_id: str | None, **content: Any) -> dict[str, Any]:
        """Send a message, and return the engine's state after it."""
        self._send_to_loader(verb, push_id, **content)
        answer = self._request(
            "POST", "/get_weights_by_name", {"name": PUSH_REPORT}, timeout_s=self.args.weight_update_timeout_s
        )
        try:
            report = json.loads(flatten_reports(answer)[0])
            return {name: report[name] for name in REPORT_FIELDS}
        except (ValueError, TypeError, IndexError, KeyError) as error:
            raise EngineError(
                f"engine {self.rank} answered {verb} with {str(answer)[:200]!r}, which is no report of its loader"
            ) from error

    def _require_push(self, push_id: str) -> None:
        if push_id != self._push_id:
            begun = f"last begun: {self._push_id}" if self._push_id else "none was begun since the last commit"
            raise WeightSyncError(f"engine {self.rank} is asked about push {push_id}; {begun}")

    def _refuse_problems(self, report: Mapping[str, Any], what: str) -> None:
        if report["problems"]:
            raise WeightSyncError(f"engine {self.rank} {what}: {_shown(report['problems'])}")

    def _refuse_unfinished_push(self) -> None:
        """Keep an engine from serving requests.

        Raises:
            WeightSyncError: a push was begun and not committed.
        """
        if self._push_id is not None:
            raise WeightSyncError(
                f"engine {self.rank} holds the unfinished push {self._push_id} and must not serve; push again, or "
                "restart it"
            )

    # SGLang's own endpoints

    def load_adapter(self, weight_version: str, config: dict[str, Any], tensors: str, is_handle: bool) -> None:
        name = f"{ADAPTER_PREFIX}{weight_version}"
        if self._adapter == name:
            return  # a resend, which only another engine missed
        self._finish_unloading()
        adapter = {"lora_name": name, "config_dict": config, "serialized_tensors": tensors}
        load_format = {"load_format": IN_ONE_BUFFER} if is_handle else {}
        self._update("/load_lora_adapter_from_tensors", adapter | load_format)
        old, self._adapter = self._adapter, name  # our plugin serves it from now on
        if old is not None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="unload adapters")
            # It waits for its requests.
            self._unloading = pool.submit(self._update, "/unload_lora_adapter", {"lora_name": old})
            pool.shutdown(wait=False)

    def _finish_unloading(self) -> None:
        """Wait for the requests of the adapter that the last push took out of use."""
        unloading, self._unloading = self._unloading, None
        try:
            if unloading is not None:
                unloading.result(self.args.weight_update_timeout_s)
        except (NoAnswer, TimeoutError):
            logger.info("engine %d: requests of an old adapter still run; the new one waits in its queue", self.rank)

    def post_verb(self, verb: Verb, payload: Mapping[str, Any]) -> None:
        """Let the server do what its endpoint of the verb says; a check that found problems raises."""
        self._update(verb.endpoint, payload)
        if payload.get("load_format") in WEIGHT_CHECKS:
            self._raise_problems(payload["load_format"])
        elif verb.loads:
            self._push_id = None

    def destroy_weights_update_group(self, group_name: str) -> None:
        try:
            self._update("/destroy_weights_update_group", {"group_name": group_name})
        except ProcessError as error:
            logger.info("group %s was not destroyed on engine %d: %s", group_name, self.rank, error)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *arguments: Any,
        **keywords: Any,
    ) -> None:
        verb = VERBS["update_weights_from_distributed"]
        dtypes = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        shapes = [list(shape) for shape in shapes]
        self.post_verb(verb, verb.payload([list(names), dtypes, shapes, *arguments], keywords))

    def get_weight_version(self) -> str | None:
        info = self._request("GET", "/model_info")
        if info is not None and not (isinstance(info, dict) and "weight_version" in info):
            raise EngineError(f"engine {self.rank} tells no weight_version in /model_info: {str(info)[:200]!r}")
        return None if info is None else info["weight_version"]

    def check_weights(self, action: str) -> None:
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

    def pull_weights(self, target_version: int, rebuild: bool = False) -> str:
        # In this process, which runs on the engine's host: stock SGLang has no endpoint for it.
        args = self.args
        path = args.sglang_custom_pull_weights_pre_read_hook
        if path is not None and target_version > 0:
            call = PluginCall("--sglang-custom-pull-weights-pre-read-hook", path)
            call_plugin(call, load_function(path), args.update_weight_disk_dir, target_version)
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
