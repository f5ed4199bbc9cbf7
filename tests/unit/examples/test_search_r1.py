"""The retriever, and a policy that searches twice before it answers."""

from __future__ import annotations

import asyncio
import importlib
import math
import re

import pytest

from slime.rollout.sglang_rollout import generate_and_rm
from slime.utils.aiohttp_threaded import run_app_in_thread
from slime.utils.async_utils import run
from slime.utils.types import Sample
from tests.contracts.source_tree import REPO

FACTS = ["pet of Kiv is Lum", "code of Lum is 74", "pet of Bab is Zof", "code of Zof is 11"]


@pytest.fixture
def example(monkeypatch):
    """Import the plug-in as a job does, with its folder on the path."""
    monkeypatch.syspath_prepend(str(REPO / "examples/search-r1"))
    module = importlib.import_module("generate_with_search")
    module.retriever_of.cache_clear()
    return module


@pytest.fixture
def server(example):
    return importlib.import_module("local_search_server")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "facts.txt"
    path.write_text("\n".join([*FACTS, ""]) + "\n")
    return str(path)


def policy(prompt):
    person = re.search(r"pet of (\w+)<", prompt)[1]
    found = re.findall(r"tool\n(.*?)<\|im_end\|>", prompt)
    if not found:
        return f"<search>pet {person}</search>"
    if len(found) == 1:
        return f"<search>code {found[0].split()[-1]}</search>"
    return f"\\boxed{{{found[1].split()[-1]}}}"


def test_scores_are_those_of_the_formula(server):
    retriever = server.Retriever(["a b", "a a c c", "d"])
    mean, norm = 7 / 3, lambda length: 1.2 * (1 - 0.75 + 0.75 * length / (7 / 3))
    assert mean == 7 / 3
    rarity_a, rarity_b = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    scores = retriever.scores("A, b?")
    assert scores[0] == pytest.approx((rarity_a + rarity_b) * 2.2 / (1 + norm(2)))
    assert scores[1] == pytest.approx(rarity_a * 2 * 2.2 / (2 + norm(4)))
    assert set(scores) == {0, 1}


@pytest.mark.parametrize(("label", "reward"), [("74", 1.0), ("11", 0.1)])
def test_a_sample_searches_twice_and_answers(example, talk, ask, corpus, label, reward):
    args, _ = talk(
        policy,
        custom_generate_function_path="generate_with_search.generate",
        custom_rm_path="generate_with_search.reward_func",
        search_corpus=corpus,
    )
    sample = asyncio.run(generate_and_rm(args, ask("code of pet of Kiv", label=label), {"max_new_tokens": 250}))
    assert sample.response.endswith("\\boxed{74}<|im_end|>")
    assert sample.reward == pytest.approx(reward)
    assert sample.metadata["num_searches"] == 2 and sample.metadata["round_number"] == 3
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length


def test_the_retriever_may_be_a_server(example, server, talk, corpus):
    handle = run_app_in_thread(server.application(server.Retriever.of_file(corpus)), host="127.0.0.1")
    try:
        args, _ = talk(policy, search_corpus=f"http://127.0.0.1:{handle.port}/retrieve", search_topk=2)
        assert run(example.observe(args, "code Zof")) == "code of Zof is 11\ncode of Lum is 74"
        assert run(example.observe(args, "xyz")) == "nothing found"
    finally:
        handle.stop()


@pytest.mark.parametrize(
    ("response", "searches", "reward"),
    [
        ("\\boxed{Saint Lum}<|im_end|>", 0, 0.8),
        ("\\boxed{Kiv}<|im_end|>", 1, 0.1),
        ("\\boxed{Kiv}<|im_end|>", 0, 0.0),
        ("Lum<|im_end|>", 2, 0.0),
    ],
)
def test_the_reward(example, response, searches, reward):
    sample = Sample(response=response, label="the Saint Lum of", metadata={"num_searches": searches})
    sample.status = Sample.Status.COMPLETED
    assert asyncio.run(example.reward_func(None, sample)) == pytest.approx(reward)
    sample.status = Sample.Status.TRUNCATED
    assert asyncio.run(example.reward_func(None, [sample])) == [0.0]
