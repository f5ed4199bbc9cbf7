"""Ray's own processes, without which no wait of the driver ends: the raylet of its node, and the GCS of the cluster.

Ray tells a driver of neither.  Calls of an actor that has not started yet stay open when the raylet dies, and a minute
after the GCS has gone Ray ends the driver itself.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._raylet import NodeID
from ray.exceptions import RpcError

from slime.utils.errors import ProcessError

CHECK_EVERY_S = 3.0
ANSWER_TIMEOUT_S = 3.0
SILENT_S = 45.0
"""Time for the GCS to answer again, as one does that its owner restarts; after 60 s Ray would end the process."""
LEAVE_TIMEOUT_S = 20.0
"""Time for the driver to leave the cluster, which it tells both."""
LOG_TAIL_LINES = 10
NEEDED = (ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET)


class RayServers:
    """What this process knows of Ray's own."""

    def __init__(self) -> None:
        self._next_check_s = self._answered_s = 0.0

    def check(self) -> None:
        """Raise when the raylet or the GCS has ended or does not answer; an actor, which ends with them, asks nothing.

        Raises:
            ProcessError: one has ended, with the end of its log where this process started it; or does not answer.
        """
        worker = ray._private.worker
        if worker.global_worker.mode != ray.SCRIPT_MODE:
            return
        node = worker._global_node
        for kind, process in node.dead_processes():
            if kind in NEEDED:
                raise ProcessError(
                    f"Ray's {kind} (process {process.pid}) ended with status {process.returncode}, and the job cannot "
                    f"go on without it (-9: killed, often for want of memory)\n{_log_tails(node, kind)}"
                )
        if time.monotonic() >= self._next_check_s:
            self._ask(worker.global_worker)
            self._next_check_s = time.monotonic() + CHECK_EVERY_S

    def _ask(self, worker: Any) -> None:
        began_s = time.monotonic()
        if began_s > self._next_check_s + SILENT_S:  # nobody has asked for so long
            self._answered_s = began_s
        own_node = NodeID.from_hex(ray.get_runtime_context().get_node_id())
        try:
            (is_alive,) = worker.gcs_client.check_alive([own_node], ANSWER_TIMEOUT_S)
        except RpcError as error:
            silent_s = time.monotonic() - self._answered_s
            if silent_s > SILENT_S:
                raise ProcessError(
                    f"Ray's gcs_server at {worker.gcs_client.address} has not answered for {silent_s:.0f} s: its "
                    f"process is stopped or has ended, or its node has ({error})"
                ) from error
            return
        self._answered_s = time.monotonic()
        if not is_alive:
            raise ProcessError(
                "Ray counts this node, the driver's, as dead: its raylet has ended, is stopped, or is too busy to "
                f"answer the GCS. Ray's logs are in {ray._private.worker._global_node.get_logs_dir_path()}"
            )


RAY = RayServers()
"""Those of this process's cluster."""


def leave_ray() -> None:
    """Leave the cluster, a private one by ending it.  Processes of Ray's that hang or are gone keep nobody.

    Ray waits for answers of both without end.
    """
    node = ray._private.worker._global_node
    thread = threading.Thread(target=ray.shutdown, name="leave-ray", daemon=True)
    thread.start()
    thread.join(LEAVE_TIMEOUT_S)
    if thread.is_alive() and node is not None:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        thread.join(LEAVE_TIMEOUT_S)


def _log_tails(node: Any, kind: str) -> str:
    tails = []
    for path in (Path(node.get_logs_dir_path()) / f"{kind}.{end}" for end in ("out", "err")):
        if path.is_file():
            text = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            tails.append("\n".join([f"--- end of {path} ---", *text]))
    return "\n".join(tails)
