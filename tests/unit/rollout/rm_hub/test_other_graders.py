"""F1, multiple choice and instruction following, with hand-made cases."""

from __future__ import annotations

import subprocess

import pytest

from slime.rollout.rm_hub import ifbench
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.utils.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("prediction", "truth", "scores"),
    [
        ("The cat sat", "a cat sat down", (0.8, 1.0, 2 / 3)),
        ("yes", "no", (0.0, 0.0, 0.0)),
        ("Yes.", "yes", (1.0, 1.0, 1.0)),
        ("yes it is", "yes", (0.0, 0.0, 0.0)),
        (None, "x", (0.0, 0.0, 0.0)),
        ("", "x", (0.0, 0.0, 0.0)),
    ],
)
def test_f1_gives_f1_precision_and_recall(prediction, truth, scores):
    assert f1_score(prediction, truth) == pytest.approx(scores)


CHOICES = {"choices": ["w", "x", "y"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("The answer is B", "B", None, 1.0),
        ("I choose x", "x", CHOICES, 1.0),
        ("blah D", "B", None, 0.0),
        ("Option: 2", 1, None, 0.0),
        ("there are 2 of them", 2, CHOICES, 0.0),
        ("I choose y", 2, CHOICES, 1.0),
        ("there are 42 of them", 42, None, 1.0),
        ("Option: B", 1, None, 1.0),
        ("<think>The answer is A</think> so (C) is correct", "C", None, 1.0),
        ("Answer: A. No wait, answer: **B**", "B", None, 1.0),
        ("the answer is a bit hard to see, but D it is", "D", None, 1.0),
        ("Final answer: C", "A", {"correct_letter": "C"}, 1.0),
        ("The answer is Z", "B", {"choices": ["red", "blue"]}, 0.0),
        ("It must be Blue.", "B", {"choices": ["red", "blue"]}, 1.0),
        ("It must be paris", "B", {"correct_answer": "Paris"}, 1.0),
        ("", "B", None, 0.0),
        ("E", "E", {"valid_letters": ["A", "B", "C", "D"]}, 1.0),
        ("red or blue", "B", {"choices": ["red", "blue"]}, 0.0),
        ("red is out: the answer is blue", "B", {"choices": ["red", "blue"]}, 1.0),
        ("It is not red, it is blue", "B", {"choices": ["red", "blue"]}, 1.0),
        ("light blue", "B", {"choices": ["light blue", "blue"]}, 0.0),
        ("light blue", "A", {"choices": ["light blue", "blue"]}, 1.0),
    ],
)
def test_gpqa_grades_letter_or_text(response, label, metadata, reward):
    assert compute_gpqa_reward(response, label, metadata) == reward


LETTERS = {"choices": ["red", "green", "blue", "grey"]}


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("Answer: $\\boxed{C}$. Option D is wrong", "C"),
        ("\\boxed{\\text{C}}", "C"),
        ("\\boxed{(C) 5 m}, as D violates the bound", "C"),
        ("The correct option is (C) because D is too large", "C"),
        ("The answer is C, and D is wrong", "C"),
        ("The answer is not D. It is C.", "C"),
        ("The answer isn't D but C", "C"),
        ("the answer to this question is C: the rate falls. D would be next", "C"),
        ("Option A: 1\nOption B: 2\nOption C: 3\nOption D: 4\nTherefore, C.", "C"),
        ("C it is, I think. A proton has charge", "C"),
        ("Answer: C\n\nA and B fail, D violates it", "C"),
        ("\u7b54\u6848\u662fC", "C"),
        ("\u7b54\u6848\uff1aC\u3002\u9009\u9879D\u9519\u8bef", "C"),
        ("\u6b63\u786e\u7b54\u6848\u662f\u9009\u9879C", "C"),
        ("\uc815\ub2f5\uc740 C\uc785\ub2c8\ub2e4", "C"),
        ("A, B, C, D", None),
        ("The answer is A, B, C or D", None),
        ("\\boxed{A, B, C, D}", None),
    ],
)
def test_a_letter_counts_where_it_names_the_answer(response, letter):
    assert [compute_gpqa_reward(response, right, LETTERS) for right in "ABCD"] == [right == letter for right in "ABCD"]


CHECKERS = """
from dataclasses import dataclass

@dataclass
class InputExample:
    key: int
    instruction_id_list: list
    prompt: str
    kwargs: list

@dataclass
class Output:
    follow_all_instructions: bool

def test_instruction_following_strict(example, prompt_to_response):
    assert example.kwargs == [{"word": "cat"}], example.kwargs
    return Output(example.kwargs[0]["word"] in prompt_to_response[example.prompt])
"""


def test_ifbench_asks_the_checkers_of_the_checkout(tmp_path, monkeypatch):
    (tmp_path / "evaluation_lib.py").write_text(CHECKERS)
    monkeypatch.setattr(ifbench, "IFBENCH_FOLDER", tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    metadata = {
        "instruction_id_list": ["keywords"],
        "kwargs": [{"word": "cat", "num": None}],
        "prompt_text": "Write of a cat",
        "record_id": 3,
    }
    assert ifbench.compute_ifbench_reward("a cat", None, metadata) == 1.0
    assert ifbench.compute_ifbench_reward("a dog", None, metadata) == 0.0
    assert ifbench.compute_ifbench_reward("", None, metadata) == 0.0
    with pytest.raises(DataError, match="instruction_id_list"):
        ifbench.compute_ifbench_reward("a cat", None, {})


def test_a_download_of_ifbench_that_does_not_end_is_an_error_with_the_command(tmp_path, monkeypatch):
    def slow(command, timeout, **options):
        assert timeout == ifbench.CLONE_TIMEOUT_S
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(ifbench.subprocess, "run", slow)
    monkeypatch.setattr(ifbench, "IFBENCH_FOLDER", tmp_path / "ifbench")
    metadata = {"instruction_id_list": ["x"], "kwargs": [{}], "prompt_text": "Write", "record_id": 3}
    with pytest.raises(ConfigError, match="cannot be fetched: .*timed out.*Put it there: git clone"):
        ifbench.compute_ifbench_reward("a cat", None, metadata)
