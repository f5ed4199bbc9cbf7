"""One SGLang engine: the life of its server process.

A plain class that ``slime.ray`` wraps in an actor.  Every request has a deadline.  An engine over several nodes has
one object per node: the first talks to the server, and the others only keep their process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.child_process import PLUGINS, ChildProcess, kill_tree
from slime.backends.sglang_utils.engine_server import EngineServer
from slime.backends.sglang_utils.router_process import register_worker, unregister_worker
from slime.backends.sglang_utils.server_args import EnginePlace, build_server_args
from slime.backends.sglang_utils.server_control import ServerControl, wait_until_healthy
from slime.backends.sglang_utils.server_guard import generation_key
from slime.flags.security import Trust
from slime.utils.env import visible_index
from slime.utils.errors import DataError, DeadlineError, EngineError, ProcessError
from slime.utils.net import format_host_port, http_url
from slime.weights.file_digests import check_in_background

logger = logging.getLogger(__name__)

SERVER_MODULE = "slime.backends.sglang_utils.server_main"
EXPANDABLE_SEGMENTS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that engines must not inherit: SGLang's memory saver does not work with expandable segments, which the
trainer may use."""
KEEP_ALIVE_S = 120
"""Seconds that an engine keeps idle connections: more than the 90 s for which the router reuses them.

By default SGLang closes them after 5 s, which is as long as a push takes, and a request sent at that moment is lost.
If it is the prefill half of a request, the router reports nothing, and the decode engine waits until its deadline.
"""


class SGLangEngine(EngineServer):
    """An engine on GPUs ``[base_gpu_id, base_gpu_id + num_gpus_per_engine)`` of this node, or on the CPU."""

    def __init__(
        self,
        args: Namespace,
        *,
        rank: int,
        worker_type: str = "regular",
        base_gpu_id: int | None = None,
        sglang_overrides: Mapping[str, Any] | None = None,
        num_gpus_per_engine: int | None = None,
        model_path: str | None = None,
        node_rank: int | None = None,
    ) -> None:
        """Describe an engine; :meth:`init` starts one, :meth:`connect` adopts a running one.

        Args:
            rank: index of this object among those of all engines and nodes.
            base_gpu_id: physical index of its first GPU on this node.
            sglang_overrides: ServerArgs fields that take precedence over flags.
            num_gpus_per_engine: GPUs of the engine, over all its nodes.
            node_rank: index of this node among the engine's nodes; by default ``rank`` modulo their number.
        """
        num_gpus_per_engine = num_gpus_per_engine or args.rollout_num_gpus_per_engine
        num_nodes = max(1, num_gpus_per_engine // args.num_gpus_per_node)
        super().__init__(args, rank, worker_type, node_rank=rank % num_nodes if node_rank is None else node_rank)
        self.base_gpu_id = base_gpu_id
        self.overrides = dict(sglang_overrides or {})
        self.num_gpus_per_engine = num_gpus_per_engine
        self.model_path = model_path or args.hf_checkpoint
        self.process: ChildProcess | None = None
        self.router: ServerControl | None = None
        self._secret = Trust.of(args).job_secret
        self._worker_key: str | None = None
        """Key that the router sends to the server."""
        self._bootstrap_port: int | None = None
        self._check: Future[None] | None = None
        """Verification of the model files' digests, which runs while the server reads them."""

    # --- life -----------------------------------------------------------------------------------------------------

    def init(self, *, timeout_s: float | None = None, register: bool = True, **addresses: Any) -> None:
        """Start the server; return when it serves and (with ``register``) the router lists it.

        Args:
            timeout_s: seconds to wait for the server; None takes ``--engine-start-timeout-s``.

        Raises:
            ProcessError: it ended or did not serve within ``timeout_s`` seconds.
            DataError: the model's files do not match their digests.
        """
        self.start_server(**addresses)
        self.wait_ready(self.args.engine_start_timeout_s if timeout_s is None else timeout_s, register=register)

    def start_server(
        self,
        *,
        dist_init_addr: str | None,
        port: int,
        nccl_port: int | None,
        host: str,
        disaggregation_bootstrap_port: int | None = None,
        router_ip: str | None = None,
        router_port: int | None = None,
    ) -> None:
        on_cpu = cpu_shim.is_needed()
        place = EnginePlace(
            rank=self.rank,
            worker_type=self.worker_type,
            num_gpus_per_engine=self.num_gpus_per_engine,
            base_gpu_id=0 if on_cpu else visible_index(self.base_gpu_id or 0),
            host=host.strip("[]"),
            port=port,
            nccl_port=nccl_port,
            dist_init_addr=dist_init_addr,
            disaggregation_bootstrap_port=disaggregation_bootstrap_port,
            node_rank=self.node_rank,
        )
        server_args = build_server_args(
            self.args, place, model_path=self.model_path, overrides=self.overrides, on_cpu=on_cpu
        )
        self.tp_size = int(server_args["tp_size"])
        self._bootstrap_port = disaggregation_bootstrap_port
        self._released.clear()
        self.unfinished_push = None
        name = f"engine {self.rank} {format_host_port(host, port)}"
        self.server = ServerControl(http_url(host, port), api_key=self._secret, name=name)
        self._worker_key = None if self._secret is None else generation_key(self._secret)
        self._find_router(router_ip, router_port)
        remove_segments()  # left by engines that were killed on this node
        self.process = start_server(
            server_args,
            name=name,
            secret=self._secret,
            plugins=self.args.engine_plugins,
        )
        reads_weights = server_args.get("load_format") != "dummy" and self.args.verify_checkpoint
        self._check = check_in_background(Path(self.model_path)) if reads_weights else None

    def _find_router(self, host: str | None, port: int | None) -> None:
        if host and port:
            self.router = ServerControl(http_url(host, port), api_key=self._secret, name="the router")

    def wait_ready(self, timeout_s: float, *, register: bool = True) -> None:
        """Wait until the server serves, then register it with the router if ``register``.  See :meth:`init`."""
        if self.node_rank != 0:
            return
        if self.process is None or self.server is None:
            raise EngineError(f"engine {self.rank} was never started; call start_server first")
        try:
            wait_until_healthy(self.process, self.server, timeout_s=timeout_s)
            self._finish_check(timeout_s)
            if register:
                self.register()
        except (ProcessError, DataError):
            self.process.stop()
            raise

    def _finish_check(self, timeout_s: float) -> None:
        try:
            if self._check is not None:
                self._check.result(timeout=timeout_s)
        except TimeoutError as error:
            raise DeadlineError(
                f"engine {self.rank}: the files of {self.model_path} are not compared with their digests after "
                f"{timeout_s:g} s (--engine-start-timeout-s); --no-verify-checkpoint leaves that out"
            ) from error

    def register(self) -> None:
        """Register this engine with the router, unless it is an encoder, which only serves other engines."""
        if self.router is not None and self.node_rank == 0 and self.worker_type != "encoder":
            register_worker(
                self.router,
                self._server().url,
                worker_type=self.worker_type,
                bootstrap_port=self._bootstrap_port,
                worker_key=self._worker_key,
            )

    def connect(
        self,
        url: str,
        *,
        tp_size: int = 1,
        bootstrap_port: int | None = None,
        router_ip: str | None = None,
        router_port: int | None = None,
    ) -> None:
        """Use an external server, and register it with the router.  slime never ends its process."""
        self.server = ServerControl(url, api_key=self._secret, name=f"engine {self.rank} {url}")
        self._worker_key = self._secret
        self.tp_size = tp_size
        self._bootstrap_port = bootstrap_port
        self._find_router(router_ip, router_port)
        self.register()

    def describe_exit(self) -> str | None:
        """See ``EngineServer``."""
        return self.process.describe_end() if self.process is not None else None

    def shutdown(self) -> None:
        if self.router is not None and self.server is not None and self.node_rank == 0:
            try:
                unregister_worker(self.router, self.server.url)
            except ProcessError as error:
                logger.warning("Engine %d stays in the router's list: %s", self.rank, error)
        if self.process is not None:
            self.process.stop()
            self.process = None
        remove_segments()

    def simulate_crash(self) -> None:
        """Kill the server without telling the router, as in a crash.  For plug-ins that inject faults."""
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            kill_tree(self.process.pid)


def start_server(
    server_args: Mapping[str, Any],
    *,
    name: str,
    secret: str | None = None,
    plugins: Sequence[Sequence[Any]] = (),
) -> ChildProcess:
    """Start an SGLang server with these ServerArgs, guarded by ``secret``; do not wait for it.

    Args:
        plugins: functions that each of its processes calls first: import path and arguments.
    """
    return ChildProcess(
        SERVER_MODULE,
        {**server_args, "job_secret": secret},
        name=name,
        extra_environment={
            **engine_environment(tp_size=int(server_args.get("tp_size", 1))),
            PLUGINS: json.dumps(plugins),
        },
        without_variables=EXPANDABLE_SEGMENTS,
    )


def engine_environment(*, tp_size: int) -> dict[str, str]:
    """Return the environment variables of an engine's process, including those of the CPU shim."""
    variables = {"SGLANG_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S)}
    if not cpu_shim.is_needed():
        return variables
    variables |= cpu_shim.ENGINE_ENVIRONMENT
    if tp_size > 1:
        cores = os.cpu_count() or 1
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(tp_size))
    return variables


# SGLang's shared memory that may outlive its processes.
#
# SGLang unlinks it when its processes exit normally; a killed process leaves 16 KiB of load statistics, and per
# multi-GPU engine a queue of 24 MiB.


SEGMENT_FOLDER = Path("/dev/shm")
SEGMENT_PATTERNS = ("sglang_loads_*.shm", "sgl_shm_mq_*")
"""File names in SGLang 0.5.15 (its load_snapshot.py and shm_broadcast.py)."""
YOUNG_SEGMENT_S = 60.0
"""Seconds; a younger segment may not have been mapped yet by its process, which may be in another container."""


def remove_segments(folder: Path = SEGMENT_FOLDER) -> list[Path]:
    """Remove this user's segments that no process has mapped: those of ended engines.  Return their paths."""
    found = [path for pattern in SEGMENT_PATTERNS for path in folder.glob(pattern) if _is_old_and_ours(path)]
    if not found:
        return []
    mapped = _mapped_below(folder)
    removed = [path for path in found if str(path) not in mapped]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def _is_old_and_ours(path: Path) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > YOUNG_SEGMENT_S


def _mapped_below(folder: Path) -> set[str]:
    """Return the files below ``folder`` that this user's processes have mapped."""
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:  # the process has ended, or belongs to another user
            continue
        prefix = f"{folder}/"
        mapped |= {line[line.index(prefix) :] for line in lines if prefix in line}
    return mapped
