"""The task of the demo with a pretrained model: rows, disjoint sets, and the scorer as a reward."""

import asyncio
import json
from argparse import Namespace
from importlib.util import find_spec

import pytest

from examples.real_model import task
from slime.utils.types import Sample

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="scripts/demo_real.sh installs it")


def test_a_row_shows_two_examples_and_asks_about_a_statement() -> None:
    row = task.rows("needle_haystack", "train", 3)[0]
    assert [turn["role"] for turn in row["prompt"]] == ["system", *["user", "assistant"] * 2, "user"]
    statements, question = row["prompt"][-1]["content"].split("\n")
    assert statements.count(". ") == 3
    assert row["label"] in statements
    assert question.startswith("Who ") and question.endswith("Reply only with a name.")


def test_no_held_out_question_is_trained_on(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["task", "--task", "chain_sum", "--output", str(tmp_path), "--train", "2000"])
    task.main()
    sets = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("train", "held_out")]
    trained, held_out = ({json.loads(line)["prompt"][-1]["content"] for line in lines} for lines in sets)
    assert len(sets[1]) == 512
    assert trained.isdisjoint(held_out)
    assert not {row["prompt"][-1]["content"] for row in task.rows("chain_sum", "train", 2000)}.isdisjoint(held_out)


@pytest.mark.parametrize(
    ("name", "label", "scores"),
    [
        (
            "needle_haystack",
            "Tayo",
            {"Tayo<|im_end|>": 1.0, " tayo": 1.0, "Tayo.": 0.0, "It is Tayo<|im_end|>": 0.0, "": 0.0, "Ta": 0.0},
        ),
        (
            "chain_sum",
            "-1760",
            {"-1760<|im_end|>": 1.0, "1 - 1761 = -1,760.0": 1.0, "1760": 0.0, "-1760 or 3": 0.0, "": 0.0, "-17": 0.0},
        ),
        (
            "chain_sum_tool",
            "12",
            {"<tool_response>\n12<|im_end|>\n<|im_start|>assistant\nno": 0.0, "1<|im_start|>assistant\n12": 1.0},
        ),
    ],
)
def test_the_reward_is_the_score_of_the_answer(name: str, label: str, scores: dict[str, float]) -> None:
    samples = [Sample(response=response, label=label, metadata={"task": name}) for response in scores]
    assert asyncio.run(task.reward(Namespace(), samples)) == list(scores.values())
    assert asyncio.run(task.reward(Namespace(), samples[0])) == next(iter(scores.values()))
