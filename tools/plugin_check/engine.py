"""An engine whose answers are given texts, tokenised by the model's tokenizer; it may abort or cut them off."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

from aiohttp import web

from slime.utils.aiohttp_threaded import run_app_in_thread

DEFAULT_ANSWERS = (
    "Let me think. 2 + 3 = 5, so the answer is \\boxed{5}.",
    "<think>Hm.</think> It must be \\boxed{6}",
    "Answer: 5",
    "\u00e4\u00f6\u00fc \u6570\u5b66 \U0001f600 \\boxed{5",
)


class AnsweringEngine:
    """Stands for the router and its only engine, within a ``with``."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        answers: Sequence[str] = DEFAULT_ANSWERS,
    ) -> None:
        self._encode, self._decode = encode, decode
        self._answers = itertools.cycle(answers)
        self.num_requests = 0
        self.is_aborting = False
        """Every answer ends after three tokens with the finish reason abort."""

    def __enter__(self) -> AnsweringEngine:
        app = web.Application()
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/workers", self._workers),
                web.get("/v1/loads", self._loads),
                web.post("/abort_request", self._abort),
                web.get("/health", self._abort),
            ]
        )
        self._app = run_app_in_thread(app, host="127.0.0.1", thread_name="answering-engine")
        self.port = self._app.port
        return self

    def __exit__(self, *error: object) -> None:
        self._app.stop()

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"workers": [{"id": "0", "url": f"http://127.0.0.1:{self.port}", "worker_type": "regular"}]}
        )

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": []})

    async def _abort(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.num_requests += 1
        ids = self._encode(next(self._answers))
        limit = (body.get("sampling_params") or {}).get("max_new_tokens") or len(ids)
        kind = "length" if limit < len(ids) else "stop"
        ids = ids[:limit]
        if self.is_aborting:
            ids, kind = ids[:3], "abort"
        num_prompt = len(body.get("input_ids") or body.get("text") or [])
        answer = {
            "text": self._decode(ids),
            "output_ids": ids,
            "meta_info": {
                "id": body.get("rid") or str(self.num_requests),
                "finish_reason": {"type": kind},
                "output_token_logprobs": [[-0.25 - 0.01 * (k % 7), token, None] for k, token in enumerate(ids)],
                "weight_version": "1",
                "prompt_tokens": num_prompt,
                "completion_tokens": len(ids),
                "cached_tokens": 0,
                "e2e_latency": 0.01,
            },
        }
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n")
        await response.write_eof()
        return response
