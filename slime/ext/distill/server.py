"""The HTTP side of the teacher server: requests as SGLang's ``/generate`` takes them, answers as it gives them.

    GET  /healthz  /detect  /info  /get_loads
    POST /generate                    log-probs of ``input_ids``; nothing is generated
    POST /update_weights_from_disk    {"model_path": a Hugging Face folder or a Megatron checkpoint}

What is not in ``OPEN`` is guarded, routes of tomorrow and paths without one included.

Requests wait in a queue; the main thread, which owns the model, takes as many at a time as fill a micro-batch on every
data-parallel rank.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from slime.ext.distill.flags import TeacherServerConfig
from slime.ext.distill.scorer import Scorer, ScoreRequest, Scores
from slime.utils.aiohttp_threaded import door, run_app_in_thread
from slime.utils.errors import DataError, SlimeError
from slime.utils.http_utils import encode_json, has_secret
from slime.utils.net import is_loopback

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 60.0
"""Between two messages to the other ranks; their waits end at ``--distributed-timeout-minutes``."""
MAX_BODY_BYTES = 64 * 2**20
BODY_S = 60.0
"""For a client to send it."""
OPEN = frozenset({"/healthz", "/detect", "/info", "/get_loads", "/generate"})
"""Paths for everybody."""
_STOP = object()


@dataclass(frozen=True, slots=True)
class _Work:
    """Sequences to score, or a folder of weights to load; ``done`` gets the scores and the version of the weights, the
    seconds of the load, or the error.
    """

    done: Future[Any]
    sequences: list[ScoreRequest] = field(default_factory=list)
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class ScoreLimits:
    """What may be asked of the model."""

    vocab_size: int
    max_length: int
    has_top: bool

    def sequences(self, body: Mapping[str, Any]) -> tuple[bool, list[ScoreRequest]]:
        """Return True for a request of one sequence, and the sequences.

        Raises:
            DataError: the request asks for something else than log-probs of tokens.
        """
        input_ids = body.get("input_ids")
        if not isinstance(input_ids, list) or not input_ids:
            raise DataError("input_ids is missing or empty; this server scores token ids, no text and no images.")
        is_single = not isinstance(input_ids[0], list)
        rows: list[Any] = [input_ids] if is_single else input_ids
        params = body.get("sampling_params") or {}
        for one in params if isinstance(params, list) else [params]:
            if not isinstance(one, dict):
                raise DataError(f"sampling_params has {one!r}; it must be an object, or a list of objects.")
            if one.get("max_new_tokens", 0) != 0:
                raise DataError(
                    f"max_new_tokens is {one['max_new_tokens']}; this server generates nothing: make it 0."
                )
        for name in ("image_data", "token_ids_logprob", "lora_path"):
            if body.get(name):
                raise DataError(
                    f"{name} is given; this server gives log-probs of input_ids, and their likeliest tokens."
                )
        starts, tops = (_each(body, name, len(rows)) for name in ("logprob_start_len", "top_logprobs_num"))
        return is_single, [self._checked(*entry) for entry in zip(rows, starts, tops, strict=True)]

    def _checked(self, tokens: Any, start: Any, top: Any) -> ScoreRequest:
        if not isinstance(tokens, list) or not 1 <= len(tokens) <= self.max_length:
            size = len(tokens) if isinstance(tokens, list) else repr(tokens)
            raise DataError(
                f"A sequence has {size} tokens; allowed are 1 to {self.max_length} (--megatron-server-max-length)."
            )
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise DataError(f"input_ids has {token!r}; tokens are 0 to {self.vocab_size - 1}.")
        start = -1 if start is None else start
        if type(start) is not int or not -1 <= start < len(tokens):
            raise DataError(
                f"logprob_start_len is {start!r}; it must be from -1 (the last token) to {len(tokens) - 1}."
            )
        top = top or 0
        if type(top) is not int or not 0 <= top <= self.vocab_size:
            raise DataError(f"top_logprobs_num is {top!r}; it must be from 0 to {self.vocab_size}.")
        if top and not self.has_top:
            raise DataError("top_logprobs_num does not work with --allgather-cp.")
        return ScoreRequest(tokens, start if start >= 0 else len(tokens) - 1, top)


class MegatronServer:
    """Rank 0's requests, and the loop that answers them.

    Args:
        scorer: rank 0's.
        config: ports and limits.
        vocab_size: tokens below it exist.
        max_length: the longest sequence.
        has_top: False where a layout has no likeliest tokens (``--allgather-cp``).
        secret: what requests for other paths than ``OPEN`` must carry; without one, they come from this host.
        info: more entries of ``/info``.
    """

    def __init__(
        self,
        scorer: Scorer,
        config: TeacherServerConfig,
        *,
        vocab_size: int,
        max_length: int,
        has_top: bool,
        secret: str | None,
        info: dict[str, Any],
    ) -> None:
        self._scorer, self._config = scorer, config
        self._limits = ScoreLimits(vocab_size, max_length, has_top)
        self._secret = secret
        self._info = info | {"max_length": max_length, "vocab_size": vocab_size}
        self._queue: queue.Queue[Any] = queue.Queue()
        self._running: list[_Work] = []
        self._version = 0
        self._trouble = ""

    def warm_up(self) -> None:
        """Score one sequence of a micro-batch's length."""
        start = time.monotonic()
        limits = self._limits
        length = max(2, min(limits.max_length, self._scorer.tokens_at_once or limits.max_length))
        self._scorer.score([ScoreRequest([0] * length, top=int(limits.has_top))])
        logger.info("Warmed up with %d tokens in %.1f s.", length, time.monotonic() - start)

    def serve(self, host: str, port: int) -> None:
        """Answer requests until ``stop`` is called; the model is used by this thread alone."""
        handle = run_app_in_thread(self.application(), host=host, port=port, thread_name="teacher server")
        logger.info("The teacher server listens at %s:%d.", host, handle.port)
        try:
            self._work()
        finally:
            handle.stop()
            self._scorer.stop()

    def application(self) -> web.Application:
        """Return the routes behind their guards."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[door(), self._guard])
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/detect", self._detect),
                web.get("/info", self._describe),
                web.get("/get_loads", self._loads),
                web.post("/generate", self._generate),
                web.post("/update_weights_from_disk", self._update_weights),
            ]
        )
        return app

    def stop(self) -> None:
        """Let ``serve`` return."""
        self._queue.put(_STOP)

    # --- the thread of the model

    def _work(self) -> None:
        while True:
            try:
                first = self._queue.get(timeout=KEEP_ALIVE_S)
            except queue.Empty:
                self._scorer.keep_alive()
                continue
            if first is _STOP:
                return
            if first.folder is not None:
                self._load(first)
            else:
                self._score([first, *self._more(first)])

    def _more(self, first: _Work) -> Iterator[_Work]:
        """Take the scoring requests that wait next, as long as a pass has room for them."""
        room = self._scorer.tokens_at_once - _tokens_of(first)
        while room > 0 and self._queue.queue:
            ahead = self._queue.queue[0]  # this thread alone takes
            if ahead is _STOP or ahead.folder is not None or _tokens_of(ahead) > room:
                return
            room -= _tokens_of(ahead)
            yield self._queue.get_nowait()

    def _score(self, works: list[_Work]) -> None:
        works = [work for work in works if work.done.set_running_or_notify_cancel()]  # the client may be gone
        if self._trouble:  # since they were sent a load has failed
            for work in works:
                work.done.set_exception(DataError(self._trouble))
            return
        if not works:
            return
        self._running = works
        scores = iter(self._scorer.score([one for work in works for one in work.sequences]))
        for work in works:
            work.done.set_result(([next(scores) for _ in work.sequences], self._version))
        self._running = []

    def _load(self, work: _Work) -> None:
        if not work.done.set_running_or_notify_cancel():
            return
        start = time.monotonic()
        try:
            self._scorer.load(str(work.folder))
        except SlimeError as error:
            self._trouble = f"the weights of {work.folder} were not loaded: {error}"
            work.done.set_exception(error)
            return
        self._version, self._trouble = self._version + 1, ""
        self._info["model_path"] = work.folder
        work.done.set_result(time.monotonic() - start)

    # --- requests

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN or self._is_trusted(request):
            return await handler(request)
        message = f"{request.path} needs the secret of the server's --job-secret-file, or a request from its own host."
        return _json({"success": False, "message": message}, 401)

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": self._trouble or "ok"}, 503 if self._trouble else 200)

    async def _detect(self, request: web.Request) -> web.Response:
        return _json({"backend": "megatron"})

    async def _describe(self, request: web.Request) -> web.Response:
        return _json(self._info | {"weight_version": str(self._version)})

    async def _loads(self, request: web.Request) -> web.Response:
        waiting = [work for work in list(self._queue.queue) if work is not _STOP]
        tokens = sum(map(_tokens_of, [*self._running, *waiting]))
        load = {"num_running_reqs": len(self._running), "num_waiting_reqs": len(waiting), "num_tokens": tokens}
        return _json({"loads": [{"dp_rank": 0, **load}]})

    async def _generate(self, request: web.Request) -> web.Response:
        begin = time.monotonic()
        try:
            body = await _object_of(request)
            is_single, sequences = self._limits.sequences(body)
        except DataError as error:
            return _json({"error": {"message": str(error)}}, 400)
        work = _Work(Future(), sequences)
        self._queue.put(work)
        try:
            scores, version = await asyncio.wrap_future(work.done)
        except DataError as error:
            return _json({"error": {"message": str(error)}}, 503)
        elapsed = time.monotonic() - begin
        answers = [_answer(one, score, version, elapsed) for one, score in zip(sequences, scores, strict=True)]
        return _json(answers[0] if is_single else answers)

    async def _update_weights(self, request: web.Request) -> web.Response:
        limit_s = self._config.megatron_server_update_timeout_s
        try:
            folder = (await _object_of(request)).get("model_path")
            if not isinstance(folder, str) or not folder:
                raise DataError(f"model_path is {folder!r}; it must be the folder of the new weights.")
        except DataError as error:
            return _json({"success": False, "message": str(error)}, 400)
        work = _Work(Future(), folder=folder)
        self._queue.put(work)
        try:
            seconds = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(work.done)), limit_s)
        except SlimeError as error:
            return _json({"success": False, "message": str(error)}, 400)
        except TimeoutError:
            message = f"Not loaded within {limit_s:g} s (--megatron-server-update-timeout-s); the load continues."
            return _json({"success": False, "message": message}, 504)
        return _json({"success": True, "message": f"loaded {folder} in {seconds:.1f} s"})

    def _is_trusted(self, request: web.Request) -> bool:
        if self._secret is None:
            return request.remote is not None and is_loopback(request.remote)
        return has_secret(request.headers.get("Authorization"), self._secret)


def _answer(request: ScoreRequest, scores: Scores, version: int, elapsed: float) -> dict[str, Any]:
    tokens = request.tokens[request.start :]
    meta: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(request.tokens),
        "completion_tokens": 0,
        "cached_tokens": 0,
        "weight_version": str(version),
        "e2e_latency": elapsed,
        "input_token_logprobs": [
            [value, token, None] for value, token in zip([None, *scores.log_probs], tokens, strict=True)
        ],
        "output_token_logprobs": [],
    }
    if request.top:
        pairs = zip(scores.top_log_probs, scores.top_ids, strict=True)
        rows = [[[value, token, None] for value, token in zip(*row, strict=True)] for row in pairs]
        meta |= {"input_top_logprobs": [None, *rows], "output_top_logprobs": []}
    return {"text": "", "output_ids": [], "meta_info": meta}


def _tokens_of(work: _Work) -> int:
    return sum(len(one.tokens) for one in work.sequences)


def _each(body: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """Return the value of a field for each of ``count`` sequences, or the list that it is."""
    value = body.get(name)
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise DataError(f"{name}: a list of {len(value)} values is given for {count} sequences; give one for each.")
    return value


async def _object_of(request: web.Request) -> dict[str, Any]:
    try:
        async with asyncio.timeout(BODY_S):
            body = json.loads(await request.read())
    except TimeoutError:
        raise DataError(f"The body was not sent within {BODY_S:.0f} s.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"The body is no JSON: {error}.") from None
    if not isinstance(body, dict):
        raise DataError(f"The body is {type(body).__name__}; it must be a JSON object.")
    return body


def _json(payload: Any, status: int = 200) -> web.Response:
    return web.Response(body=encode_json(payload), status=status, content_type="application/json")
