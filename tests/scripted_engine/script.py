"""Answers of a scripted engine: tokens, log-probs and faults, all functions of the request alone.

The response to a prompt is determined by (prompt tokens, sampling seed).  Response tokens are ``FIRST_RESPONSE_TOKEN``
and above, prompt and tool tokens below, so a request that ends in response tokens continues that response:
however often it is interrupted, the same sequence results.
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

FIRST_RESPONSE_TOKEN = 200_000
"""Above the prompt tokens of every test, so that none is mistaken for a response token."""
VOCABULARY = 50_000
"""Number of different response tokens."""


@dataclass
class Fault:
    """A fault of requests to ``/generate``.

    ``kind`` is one of: ``die`` (the whole engine drops its connections and stops listening), ``hang`` (no answer until
    the engine stops), ``garbage`` (status 200 without JSON), ``half`` (the answer is cut in the middle), ``slow`` (the
    answer comes ``seconds`` later), ``status`` (the answer is ``status``), ``empty`` (an object without meta_info).
    """

    kind: str
    requests: Sequence[int] | None = None
    """Numbers of the requests, from 0 over the engine's life; None: every request that ``when`` accepts."""
    when: Callable[[Request], bool] | None = None
    times: int = 1
    """How often it strikes."""
    seconds: float = 0.0
    status: int = 503


@dataclass
class Request:
    """One call of ``/generate``, read."""

    number: int
    """Number of earlier requests to this engine."""
    payload: dict[str, Any]
    prompt: tuple[int, ...]
    """Tokens before the response that is to be continued."""
    earlier: int
    """Response tokens at the end of the request."""
    seed: int
    limit: int
    """``max_new_tokens``."""
    rid: str
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        """The prompt as text, if its tokens are code points."""
        return "".join(chr(token) for token in self.prompt if token < FIRST_RESPONSE_TOKEN)


@functools.lru_cache(maxsize=4096)
def draw(prompt: tuple[int, ...], seed: int) -> int:
    """64 bits that depend only on the prompt and the seed."""
    raw = struct.pack(f"<{len(prompt) + 1}q", seed, *prompt)
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "little")


@dataclass
class Script:
    """The engine's behavior.  Subclass it, or pass functions, if the fields are not enough."""

    length: int | tuple[int, int] | Callable[[Request], int] = (2, 12)
    """Response tokens before the end token: one number, a range (both ends included), or a function."""
    hold_after: int | None | Callable[[Request], int | None] = None
    """Generate this many tokens, then wait for an abort; None: do not wait."""
    holds: int = 10**9
    """Number of requests that wait; later ones go through."""
    seconds_per_token: float = 0.0
    """Seconds per token.  An abort ends the response after as many tokens as the time allowed."""
    max_context: int | None = None
    """Longer requests are refused with status 400, as SGLang does."""
    chunk_tokens: int = 4
    """Tokens in each piece of a stream."""
    gather: int = 0
    """Answer nothing before this many requests wait at once (only the first time)."""
    faults: list[Fault] = field(default_factory=list)
    log_prob: Callable[[int, int], float] | None = None
    """(token, position) -> log-prob in nats; None: a fixed hash of both."""

    def length_of(self, request: Request) -> int:
        """Tokens of the whole response, including those of earlier calls."""
        if callable(self.length):
            return self.length(request)
        if isinstance(self.length, int):
            return self.length
        low, high = self.length
        return low + draw(request.prompt, request.seed) % (high - low + 1)

    def hold_of(self, request: Request) -> int | None:
        """Tokens after which the request waits for an abort."""
        wanted = self.hold_after(request) if callable(self.hold_after) else self.hold_after
        if wanted is None or self.holds <= 0:
            return None
        self.holds -= 1
        return wanted

    def tokens_of(self, request: Request, start: int, stop: int) -> list[int]:
        """Response tokens ``start`` to ``stop`` (positions in the whole response)."""
        base = draw(request.prompt, request.seed)
        return [FIRST_RESPONSE_TOKEN + (base + 7919 * position) % VOCABULARY for position in range(start, stop)]

    def log_probs_of(self, tokens: Sequence[int], start: int) -> list[float]:
        """Log-probs of response tokens that begin at position ``start``."""
        value = self.log_prob or scripted_log_prob
        return [value(token, start + k) for k, token in enumerate(tokens)]

    def fault_of(self, request: Request) -> Fault | None:
        """The first fault that applies to this request, which uses it up."""
        for fault in self.faults:
            fits = fault.requests is None or request.number in fault.requests
            if fault.times > 0 and fits and (fault.when is None or fault.when(request)):
                fault.times -= 1
                return fault
        return None


def scripted_log_prob(token: int, position: int) -> float:
    """A log-prob between -4 and 0 with as many digits as a real one."""
    return -((token * 31 + position * 17) % 3989) / 997.0


def text_of(tokens: Sequence[int]) -> str:
    """The text of response tokens."""
    return "".join(f"<{token - FIRST_RESPONSE_TOKEN}>" for token in tokens)


def split_prompt(input_ids: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """``(tokens before the response to continue, its existing tokens)``."""
    earlier = 0
    for token in reversed(input_ids):
        if token < FIRST_RESPONSE_TOKEN:
            break
        earlier += 1
    return tuple(input_ids[: len(input_ids) - earlier]), earlier
