"""Search in several turns, with a retriever in the same process.

    --custom-generate-function-path generate_with_search.generate
    --custom-rm-path generate_with_search.reward_func

with this folder on PYTHONPATH.  The policy searches with ``<search>words</search>``, and the results are the next
message.  A turn without a search is the final answer.  Settings, by ``--custom-config-path``: ``search_corpus`` (a
file with one document per line, or the URL of a server), ``search_max_turns``, ``search_topk``.

Source: training a policy to search is from Search-R1, arXiv:2503.09516.
"""

from __future__ import annotations

import asyncio
import functools
import re
from argparse import Namespace
from typing import Any

from local_search_server import Retriever

from examples.tiny_arithmetic.reward import ends_behind_its_box
from slime.rollout.multi_turn import converse
from slime.rollout.rm_hub import extract_boxed_answer, f1_score
from slime.utils.http_utils import post
from slime.utils.types import Sample

MAX_TURNS = 4
TOPK = 1
MAX_OBSERVATION_CHARACTERS = 2000
NOTHING = "nothing found"
HALF_MARK = 0.1
"""Reward of a wrong answer after a search."""

_SEARCH, _SEARCH_END = re.compile(r"<search>(.*?)</search>", re.DOTALL), "</search>"


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """``--custom-generate-function-path``: search until the policy answers."""

    async def environment(turn: str) -> str | None:
        # Stop at the last closing tag: unclosed tags after it would make the search quadratic.
        queries = _SEARCH.findall(turn, 0, turn.rfind(_SEARCH_END) + len(_SEARCH_END))
        if not queries:
            return None
        sample.metadata["num_searches"] = sample.metadata.get("num_searches", 0) + 1
        return await observe(args, queries[-1].strip())

    max_turns = getattr(args, "search_max_turns", MAX_TURNS)
    return await converse(args, sample, sampling_params, environment, max_turns=max_turns)


async def observe(args: Namespace, query: str) -> str:
    """Return the text of the best documents for ``query``, as shown to the policy."""
    corpus, topk = str(args.search_corpus), getattr(args, "search_topk", TOPK)
    if corpus.startswith("http"):
        documents = (await post(corpus, {"query": query, "topk": topk}))["documents"]
    else:
        documents = await asyncio.to_thread(lambda: retriever_of(corpus).search(query, topk))
    return "\n".join(documents)[:MAX_OBSERVATION_CHARACTERS] or NOTHING


@functools.cache
def retriever_of(corpus: str) -> Retriever:
    """Return the index of a file, built once per process."""
    return Retriever.of_file(corpus)


def grade(sample: Sample) -> float:
    """Return the F1 of the boxed answer; 0.1 for a wrong answer after a search; 0 for a truncated response."""
    if sample.status is not Sample.Status.COMPLETED or not ends_behind_its_box(sample):
        return 0.0
    answer = extract_boxed_answer(sample.response) or ""
    score = f1_score(answer, sample.label or "")[0]
    return float(score) or HALF_MARK * bool(sample.metadata.get("num_searches"))


async def reward_func(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """``--custom-rm-path``: return a number for one sample, or a list for a list of samples."""
    if isinstance(sample, list):
        return [grade(one) for one in sample]
    return grade(sample)
