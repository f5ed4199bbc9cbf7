"""The task of the demo with a pretrained model: rows, disjoint sets, and the scorer as a reward."""

import asyncio
from argparse import Namespace
from importlib.util import find_spec

import pytest

from examples.real_model import task
from slime.utils.types import Sample

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="scripts/demo_real.sh installs it")


def test_a_row_shows_two_examples_and_asks_about_a_statement() -> None:
    row = task.rows("train", 3)[0]
    assert [turn["role"] for turn in row["prompt"]] == ["system", *["user", "assistant"] * 2, "user"]
    statements, question = row["prompt"][-1]["content"].split("\n")
    assert statements.count(". ") == task.STATEMENTS
    assert row["label"] in statements
    assert question.startswith("Who ") and question.endswith("Reply only with a name.")


def test_no_held_out_question_is_trained_on() -> None:
    trained, held_out = (
        {row["prompt"][-1]["content"] for row in task.rows(name, 300)} for name in ("train", "held_out")
    )
    assert len(trained) == len(held_out) == 300
    assert trained.isdisjoint(held_out)


def test_the_reward_is_the_score_of_the_name_alone() -> None:
    scores = {"Tayo<|im_end|>": 1.0, " tayo": 1.0, "Tayo.": 0.0, "It is Tayo<|im_end|>": 0.0, "": 0.0, "Ta": 0.0}
    samples = [Sample(response=response, label="Tayo") for response in scores]
    assert asyncio.run(task.reward(Namespace(), samples)) == list(scores.values())
    assert asyncio.run(task.reward(Namespace(), samples[0])) == 1.0
