"""The client of an engine's server: health, generation, memory, profiles, and weights."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.backends.sglang_utils.server_control import CONTROL_TIMEOUT_S, ServerControl, flush_cache, probe_answer
from slime.backends.sglang_utils.weight_verbs import WeightVerbs
from slime.utils.errors import EngineDiedError, EngineError, ProcessError

MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")


class EngineServer(WeightVerbs):
    """An engine's server, reached over HTTP, whoever started it."""

    def __init__(self, args: Namespace, rank: int, worker_type: str, node_rank: int) -> None:
        self.args, self.rank, self.worker_type = args, rank, worker_type
        self.node_rank = node_rank
        """Index of this node among the engine's nodes; node 0 serves HTTP."""
        self.server: ServerControl | None = None
        self.tp_size = 1
        self._released: set[str] = set()

    def get_url(self) -> str | None:
        """Return ``http://host:port`` of the server; None on a node that does not serve HTTP."""
        return self.server.url if self.server is not None and self.node_rank == 0 else None

    def describe_exit(self) -> str | None:
        """Describe how the server process ended, with the end of its log; None while it runs or before its start."""
        raise NotImplementedError

    def health_generate(self, timeout: float = 30.0) -> bool:
        """Return True once the engine has generated a token.

        Raises:
            EngineError: it did not within ``timeout`` seconds.
        """
        self._request("GET", "/health_generate", timeout_s=timeout)
        return True

    def check_health(self, timeout_s: float) -> None:
        """Check that the engine generates and, for a regular engine, that its answer is well-formed.

        Raises:
            EngineError: it does not respond within ``timeout_s`` seconds, or its answer is malformed.
        """
        deadline_s = time.monotonic() + timeout_s
        self.health_generate(timeout_s)
        if self.worker_type == "regular" and self.node_rank == 0:
            probe_answer(self._server(), timeout_s=max(1.0, deadline_s - time.monotonic()))

    def pause_generation(self) -> None:
        """Abort running requests, which return partial output, and hold new ones until :meth:`continue_generation`."""
        self._request("POST", "/pause_generation", {})

    def continue_generation(self) -> None:
        """Resume serving, including the requests that arrived during the pause.

        Raises:
            WeightSyncError: the engine has an unfinished push.
        """
        self.refuse_unfinished_push()
        self._request("POST", "/continue_generation", {})

    def abort_all(self) -> None:
        """Abort running and waiting requests; the engine continues to accept new ones."""
        self._request("POST", "/abort_request", {"abort_all": True})

    def flush_cache(self) -> None:
        """Flush the prefix cache; waits up to a minute for requests in flight to finish."""
        if self.node_rank == 0:
            flush_cache(self._server())

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Release the memory of ``tags`` (default: all), except memory that is released already.

        The engine must be idle: SGLang's scheduler exits if it has to release memory during a request.
        """
        self.flush_cache()
        wanted = [tag for tag in tags or MEMORY_TAGS if tag not in self._released]
        if wanted:
            self._request("POST", "/release_memory_occupation", {"tags": wanted})
            self._released.update(wanted)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Resume the memory of ``tags`` (default: all), limited to tags that were released."""
        wanted = [tag for tag in tags or MEMORY_TAGS if tag in self._released]
        if wanted:
            self._request("POST", "/resume_memory_occupation", {"tags": wanted})
            self._released.difference_update(wanted)

    def start_profile(self, **options: Any) -> None:
        """Start SGLang's profiler; ``options`` are the fields of its ``/start_profile``."""
        self._request("POST", "/start_profile", options)

    def stop_profile(self) -> None:
        self._request("POST", "/stop_profile", {}, timeout_s=self.args.weight_update_timeout_s)

    def _server(self) -> ServerControl:
        if self.server is None:
            raise EngineError(f"engine {self.rank} was never started; call init first")
        return self.server

    def _request(self, method: str, path: str, payload: Any = None, *, timeout_s: float | None = None) -> Any:
        """Send a request and return the server's answer; None on nodes that do not serve HTTP."""
        if self.node_rank != 0:
            return None
        try:
            return self._server().request(method, path, timeout_s=timeout_s or CONTROL_TIMEOUT_S, json=payload)
        except ProcessError as error:
            if end := self.describe_exit():
                raise EngineDiedError(f"{error}\n{end}") from error
            raise
