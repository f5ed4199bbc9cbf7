"""The server of an engine as its actor asks it: health, generation, memory, profiles, and weights."""

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
    """A server that is reached over HTTP, wherever it came from."""

    def __init__(self, args: Namespace, rank: int, worker_type: str, node_rank: int) -> None:
        self.args, self.rank, self.worker_type = args, rank, worker_type
        self.node_rank = node_rank
        """Number of this node among the engine's; 0 serves HTTP."""
        self.server: ServerControl | None = None
        self.tp_size = 1
        self._released: set[str] = set()

    def get_url(self) -> str | None:
        """Return ``http://host:port`` of the server; None on a node that serves no HTTP."""
        return self.server.url if self.server is not None and self.node_rank == 0 else None

    def describe_exit(self) -> str | None:
        """Describe how the server process ended, with the end of its log; None while it runs or before its start."""
        raise NotImplementedError

    def health_generate(self, timeout: float = 30.0) -> bool:
        """Return True once the engine has generated a token.

        Raises:
            EngineError: it does not, within ``timeout`` seconds.
        """
        self._request("GET", "/health_generate", timeout_s=timeout)
        return True

    def check_health(self, timeout_s: float) -> None:
        """Check that the engine generates and, for a regular engine, that its answer is well-formed.

        Raises:
            EngineError: it gives no sign of life within ``timeout_s`` seconds, or a malformed answer.
        """
        deadline_s = time.monotonic() + timeout_s
        self.health_generate(timeout_s)
        if self.worker_type == "regular" and self.node_rank == 0:
            probe_answer(self._server(), timeout_s=max(1.0, deadline_s - time.monotonic()))

    def pause_generation(self) -> None:
        """Abort running requests (their partial output is returned) and hold new ones until told to continue."""
        self._request("POST", "/pause_generation", {})

    def continue_generation(self) -> None:
        """Serve again, with the requests that came in while paused.

        Raises:
            WeightSyncError: the engine holds a push that was begun and not committed.
        """
        self.refuse_unfinished_push()
        self._request("POST", "/continue_generation", {})

    def abort_all(self) -> None:
        """Abort running and waiting requests; new ones are served."""
        self._request("POST", "/abort_request", {"abort_all": True})

    def flush_cache(self) -> None:
        """Drop the prefix cache; waits up to a minute for requests in flight to end."""
        if self.node_rank == 0:
            flush_cache(self._server())

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Give away the memory of ``tags`` (default: all).  What is released already stays so.

        The engine must be idle: SGLang's scheduler ends itself when asked to release in the middle of a request.
        """
        self.flush_cache()
        wanted = [tag for tag in tags or MEMORY_TAGS if tag not in self._released]
        if wanted:
            self._request("POST", "/release_memory_occupation", {"tags": wanted})
            self._released.update(wanted)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take back the memory of ``tags`` (default: all); only what was released is asked for."""
        wanted = [tag for tag in tags or MEMORY_TAGS if tag in self._released]
        if wanted:
            self._request("POST", "/resume_memory_occupation", {"tags": wanted})
            self._released.difference_update(wanted)

    def start_profile(self, **options: Any) -> None:
        """Start SGLang's profiler; ``options`` are those of its ``/start_profile``."""
        self._request("POST", "/start_profile", options)

    def stop_profile(self) -> None:
        self._request("POST", "/stop_profile", {}, timeout_s=self.args.weight_update_timeout_s)

    def _server(self) -> ServerControl:
        if self.server is None:
            raise EngineError(f"engine {self.rank} was never started; call init first")
        return self.server

    def _request(self, method: str, path: str, payload: Any = None, *, timeout_s: float | None = None) -> Any:
        """Send a request and return the server's answer; None on nodes that serve no HTTP."""
        if self.node_rank != 0:
            return None
        try:
            return self._server().request(method, path, timeout_s=timeout_s or CONTROL_TIMEOUT_S, json=payload)
        except ProcessError as error:
            if end := self.describe_exit():
                raise EngineDiedError(f"{error}\n{end}") from error
            raise
