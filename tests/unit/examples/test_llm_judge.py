"""The LLM judge, against a scripted OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from argparse import Namespace

import pytest
from aiohttp import web

from examples.llm_judge import grade
from slime.utils.errors import ConfigError, GraderError
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.scripted_engine.server import ThreadedServer


class Judge(ThreadedServer):
    """Gives 8 of 10 if the answer contains the reference, and omits the score of an empty answer."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[dict] = []

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/chat/completions", self._complete)]

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        answer = body["messages"][0]["content"].split("----")[1].strip()
        text = (
            f"It says {answer}. Score: 3 at first sight.\nScore: {8 if 'Rome' in answer else 0}" if answer else "Hm."
        )
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.fixture
def judge():
    with Judge() as server:
        yield server


def graded(server, sample, **settings):
    settings = settings or {"judge_url": server.url, "judge_model": "mine"}

    async def run():
        try:
            return await grade(Namespace(**settings), sample)
        finally:
            await close_http_client()

    return asyncio.run(run())


def answered(response):
    return Sample(prompt="What is the capital of Italy?", label="Rome", response=response)


def test_the_last_score_of_the_judge_is_the_reward(judge):
    assert graded(judge, answered("It is Rome.")) == 0.8
    assert graded(judge, answered("Milan")) == 0.0
    asked = judge.requests[0]
    assert asked["model"] == "mine" and asked["temperature"] == 0
    assert "capital of Italy" in asked["messages"][0]["content"] and "reference answer is: Rome" in str(asked)


def test_a_judge_without_a_score_is_a_failed_grading(judge):
    with pytest.raises(GraderError, match="no line 'Score: N'"):
        graded(judge, answered(""))


def test_the_job_s_own_judge_is_asked_and_never_the_policy(judge):
    address = ("127.0.0.1", int(judge.url.rpartition(":")[2]))
    assert graded(judge, answered("Rome"), sglang_model_routers={"policy": ("::1", 1), "judge": address}) == 0.8
    assert judge.requests[0]["model"] == "judge"
    with pytest.raises(ConfigError, match="give judge_url in --custom-config-path, or a model named judge"):
        graded(judge, answered("Rome"), sglang_model_routers={"policy": address})
