"""A scripted engine that requests the calculator twice and then answers, whatever the prompt."""

from __future__ import annotations

import json
from typing import Any

from tests.scripted_engine.script import FIRST_RESPONSE_TOKEN, Request, Script
from tests.scripted_engine.server import ScriptedEngine


def num_tool_results(request: Request) -> int:
    """Number of runs of other tokens after response tokens: the observations inserted by the plug-in."""
    tokens = request.prompt
    return sum(before >= FIRST_RESPONSE_TOKEN > after for before, after in zip(tokens, tokens[1:], strict=False))


class TalkingEngine(ScriptedEngine):
    """The first answers to a prompt are ``<calc>2+3</calc>``, the last is ``\\boxed{...}`` with the tool's result.

    Every other response is wrong, so that rewards differ within a group.
    """

    num_calls = 2
    _turn = 0

    def render(self, request: Request, count: int, kind: str | None, began: float) -> bytes:
        answer: dict[str, Any] = json.loads(super().render(request, count, kind, began))
        turn = num_tool_results(request)
        if turn < self.num_calls:
            answer["text"] = "Let me see. <calc>2+3</calc>"
        else:
            self._turn += 1
            answer["text"] = "So it is \\boxed{5}" if self._turn % 2 else "So it is \\boxed{6}"
        return json.dumps(answer).encode()


def talking_script(**fields: Any) -> Script:
    """Three to six tokens per turn."""
    return Script(**{"length": (3, 6), **fields})
