"""Golden vectors of the math graders, and limits on the work that a response can cause."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

import pytest

from slime.rollout.rm_hub import math_dapo_utils, math_utils, symbolic
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.rollout.rm_hub.symbolic import SymbolicWorker
from slime.utils.errors import GraderError


def thought(answer: str) -> str:
    return "<think>x</think> \\boxed{" + answer + "}"


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (thought("42"), 42, 1),
        ("\\boxed{42}", "42", 0),
        ("<think>a</think> answer 42", "42", 0),
        (thought("\\frac{1}{2}"), "0.5", 1),
        (thought("\\frac{2}{4}"), "\\frac{1}{2}", 0),
        (thought("1,000"), "1000", 1),
        (thought("x^2+1"), "1+x^2", 1),
        (thought("(1,2)"), "(1, 2)", 1),
        (thought("50\\%"), "50", 1),
        (thought("3.0"), "3", 1),
        (thought("7 \\text{ cm}"), "7", 1),
        ("###Response \\boxed{5}", "5", 1),
        ("###Response \\boxed{4} no ###Response \\boxed{5}", "5", 1),
        ("###Response \\boxed{4} no ###Response \\boxed{5}", "4", 0),
        ("<think>\\boxed{1}</think> \\boxed{2} no, \\boxed{3}", "3", 1),
        (thought("5"), "", 0),
        (thought("5"), 5, 1),
        (thought("\\sqrt{2}/2"), "\\frac{\\sqrt{2}}{2}", 1),
        (thought("1/2"), "0.50", 1),
        (thought("10^{2}"), "100", 0),
        (thought("3"), "\\boxed{3}", 1),
        (thought("4"), ["3", "4"], 1),
        (thought("4"), None, 0),
    ],
)
def test_deepscaler_grades_golden_vector(response, label, reward):
    assert get_deepscaler_rule_based_reward(response, label) == reward


@pytest.mark.parametrize(
    ("response", "label", "score", "prediction"),
    [
        ("Answer: 42", "42", 1.0, "42"),
        ("Answer: 42.", "42", -1.0, "42."),
        ("Answer: $42$", "42", 1.0, "42"),
        ("answer : \\boxed{42}", "42", 1.0, "42"),
        ("it is 42", "42", -1.0, "[INVALID]"),
        ("Answer: 1,000", "1000", 1.0, "1000"),
        ("Answer: 1\nAnswer: 42", "42.0", 1.0, "42"),
        ("Answer: x = 7 \\text{cm}", 7, 1.0, "7"),
        ("Answer: \\frac12", "\\frac{1}{2}", 1.0, "\\frac{1}{2}"),
        ("Answer: 42" + " " * 300, "42", -1.0, "[INVALID]"),
    ],
)
def test_dapo_grades_golden_vector(response, label, score, prediction):
    assert math_dapo_utils.compute_score(response, label) == {"score": score, "acc": score > 0, "pred": prediction}


def test_strict_box_of_dapo_reads_the_box_only():
    assert math_dapo_utils.compute_score("Answer: \\boxed{42}", "42", strict_box_verify=True)["score"] == 1.0
    assert math_dapo_utils.compute_score("Answer: 42", "42", strict_box_verify=True)["pred"] is None


@pytest.mark.parametrize(
    ("response", "label", "is_right"),
    [
        ("so \\boxed{\\text{A}}", "A", True),
        ("so 7", "7", False),
        ("\\boxed{7}", "", False),
        ("\\boxed{7}", None, False),
        ("\\boxed{0}", 0, True),
        ("\\boxed{0}", 0.0, True),
        ("\\boxed{7}", "so \\boxed{7}", True),
        ("\\boxed{7", "7", False),
        ("\\boxed{8}", "7", False),
        ("\\boxed{7\\frac{3}{4}}", "7.75", True),
        ("\\boxed{[1, 2)}", "(1, 2)", False),
        ("\\boxed{(1, 2, 3)}", "(1, 2)", False),
        ("\\boxed{3 \\text{ and } 4}", "3 \\text{ and } 4", True),
        ("\\boxed{2 million}", "2000000", False),
        ("\\boxed{90^\\circ}", "90", True),
        ("\\boxed{\\dfrac{3}{4}}", "3/4", True),
        ("\\boxed{x=5}", "5", True),
        ("\\boxed{2\\pi r}", "\\pi 2 r", False),
        ("\\boxed{2\\pi}", "\\pi*2", True),
        ("\\boxed{9007199254740993}", "9007199254740992", False),
        ("\\boxed{123456789012345678901}", "123456789012345678900", False),
        ("\\boxed{123456789012345678901}", "+123456789012345678901 \\text{ cm}", True),
        ("\\boxed{1,234}", "1234.0", True),
        ("\\boxed{1234567890}", "1,234,567,890", True),
        ("\\boxed{1,234,567,890}", "1234567891", False),
    ],
)
def test_math_grades_by_box(response, label, is_right):
    assert grade_answer_verl(response, label) is is_right


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("\\dfrac12", "\\frac{1}{2}"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("-3/4", "\\frac{-3}{4}"),
        (".5", "\\frac{1}{2}"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("k = 4", "4"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("5 \\text{ miles}", "5"),
        ("\\text{yes}", "yes"),
        ("", ""),
    ],
)
def test_mathd_normal_form(before, after):
    assert math_utils.mathd_normalize_answer(before) == after


def test_box_extraction_balances_braces():
    assert math_utils.extract_boxed_answer("\\boxed{1} then \\boxed{\\frac{1}{2}} end") == "\\frac{1}{2}"
    assert math_utils.extract_boxed_answer("\\fbox{1}") is None
    assert math_utils.last_boxed_only_string("\\fbox{1}") == "\\fbox{1}"
    assert math_utils.remove_boxed("1") is None
    with pytest.raises(AssertionError, match="not a box"):
        math_dapo_utils.remove_boxed("1")


ENDLESS = "((x+1)^99+(y+z)^99)^99-(x+2)^99"


def test_an_expression_that_never_ends_is_wrong_and_the_next_one_is_graded():
    worker = SymbolicWorker(time_limit_s=1.0)
    try:
        assert worker.answer_to({"expression": "x+1-(1+x)"}) == {"is_zero": True}
        began = time.monotonic()
        assert worker.answer_to({"expression": ENDLESS}) is None
        assert time.monotonic() - began < 60
        assert worker.answer_to({"expression": "2x-x-x"}) == {"is_zero": True}
        assert worker.answer_to({"expression": "(((("}) == {"is_zero": False}
    finally:
        worker.close()


def test_a_process_of_the_graders_that_does_not_start_is_an_error_and_not_a_wrong_answer(monkeypatch):
    monkeypatch.setattr(symbolic, "START_LIMIT_S", -0.9)
    worker = SymbolicWorker()
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = partial(subprocess.Popen, silent, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    children: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(worker, "_start", lambda: children.append(start()) or children[-1])
    for _ in range(2):  # a new child process the second time
        with pytest.raises(GraderError, match="did not start: no answer within .*import sympy"):
            worker.answer_to({"expression": "x-x"})
    assert [child.poll() for child in children] == [-9, -9]


def test_an_answer_is_graded_while_thousands_of_files_are_open():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    held = [open("/dev/null") for _ in range(1500)]
    try:
        worker = symbolic.SymbolicWorker()
        assert worker.answer_to({"expression": "2x - x - x"}) == {"is_zero": True}
        worker.close()
    finally:
        for file in held:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
