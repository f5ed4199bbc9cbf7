"""Text from a policy or a data file cannot run code in a grader, block it, or end the run."""

from __future__ import annotations

import asyncio
import re
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from slime.rollout.rm_hub import async_rm, policy, symbolic
from slime.rollout.rm_hub.symbolic import SymbolicWorker
from slime.utils.types import Sample

AS_FULL_WIDTH = {ord(letter): ord(letter) + 0xFEE0 for letter in map(chr, range(33, 127))}
AS_ITALICS = {ord(letter): 0x1D622 + ord(letter) - 97 for letter in map(chr, range(97, 123))}
AS_CYRILLIC = str.maketrans("aceopxyi", "асеорхуі")
LIGATURES = str.maketrans({"f": "ſ", "_": "︳"})


def styles(text: str) -> list[str]:
    """The text, and texts that Python reads as the same names, or that look alike."""
    letters_only = re.sub(r"\w", lambda letter: letter[0].translate(AS_FULL_WIDTH), text)
    return [
        text,
        text.translate(AS_FULL_WIDTH),
        letters_only,
        text.translate(AS_ITALICS),
        text.translate(AS_CYRILLIC),
        text.translate(LIGATURES),
        text.replace("_", "_\u0301"),
    ]


PROGRAMS = (
    "open('{canary}','w')",
    "(1).__class__.__base__.__subclasses__()",
    "x.subs(y,x)",
    "x.evalf.__func__.__globals__",
    "[open('{canary}','w') for x in (1,)]",
    "(lambda: open('{canary}','w'))()",
    "(x:=open('{canary}','w'))",
    'f\'{{open("{canary}", "w")}}\'',
    "__import__('os').system('touch {canary}')",
    "x._assumptions.copy().__init__",
    "\\u005f\\u005fimport\\u005f\\u005f",
    "1if open('{canary}','w')else 2",
    "sympify(chr(49))",
)
CODE = [style for program in PROGRAMS for style in styles(program)]


@pytest.fixture(scope="module")
def worker() -> Iterator[SymbolicWorker]:
    worker = SymbolicWorker()
    yield worker
    worker.close()


@pytest.mark.parametrize("rm_type", ["math", "deepscaler", "dapo", "f1", "gpqa", "boxed_f1"])
def test_code_as_an_answer_and_as_a_label_is_a_wrong_answer(rm_type, tmp_path):
    canary = tmp_path / "canary"
    for code in CODE:
        text = code.replace("{canary}", str(canary))
        assert wrong(rm_type, f"</think>\\boxed{{{text}}}", "31/7")
        assert wrong(rm_type, "</think>\\boxed{31/7}", text)
    assert not canary.exists()


def wrong(rm_type: str, response: str, label: Any) -> bool:
    """Grade; return True for the reward of a wrong answer that is not a grader failure."""
    sample = Sample(index=1, response=response, label=label)
    reward = asyncio.run(async_rm(Namespace(rm_type=rm_type, custom_rm_path=None, rm_timeout_s=60.0), sample))
    assert not sample.metadata.get("reward_error"), sample.metadata
    return reward in (0, {"score": -1.0, "acc": False, "pred": reward["pred"] if isinstance(reward, dict) else ""})


def test_the_process_of_the_graders_has_no_secret_and_no_right(worker, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("PYTHONPATH", raising=False)  # a worker without namespaces inherits it
    for is_isolated in (True, False):
        fresh = SymbolicWorker()
        fresh._is_isolated = is_isolated
        monkeypatch.setattr(symbolic, "_WORKER_FILE", WorkerWithHole())
        try:
            assert fresh.answer_to({"expression": "1-1"}) == {
                "variables": ["LANG", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED"],
                "refused": ["fork", "kill", "open", "socket", "system", "unlink"],
            }
        finally:
            fresh.close()


class WorkerWithHole:
    """The worker's program, modified to attempt an escape instead of answering."""

    def read_text(self, encoding: str) -> str:
        source = symbolic.Path(symbolic.__file__).with_name("symbolic_worker.py").read_text(encoding=encoding)
        return source.replace('answer = {"is_zero": is_zero(question["expression"])}', "answer = misuse()").replace(
            "def main()", f"{HOLE}\n\ndef main()"
        )


HOLE = """
def misuse():
    import os, socket, tempfile
    attempts = {
        "open": lambda: open("/tmp/slime-grader-canary", "w"),
        "unlink": lambda: os.unlink("/etc/passwd"),
        "system": lambda: 1 / (os.system("true") == 0),
        "fork": lambda: os._exit(0) if os.fork() == 0 else None,
        "socket": socket.socket,
        "kill": lambda: os.kill(os.getppid(), 0),
    }
    refused = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except (OSError, ZeroDivisionError):
            refused.append(name)
    return {"variables": sorted(set(os.environ)), "refused": sorted(refused)}
"""

N = 100_000
LONG = {
    "words": "so much to say 7 " * 3_000_000,
    "brackets": "(" * N,
    "braces": "{" * N,
    "backslashes": "\\" * N,
    "nested fractions": "\\frac{" * N,
    "roots": "\\sqrt[" * N,
    "surrogates": "\ud800" * N,
    "blanks": " " * N + "x",
    "dollars": "$" * N + "\n$",
    "digits": "1" * N,
    "answers": "Answer: " * N,
    "thoughts": "</think>" * N,
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("rm_type", ["math", "dapo", "gpqa", "boxed_f1"])
@pytest.mark.timeout(60)
def test_a_monstrous_text_is_a_wrong_answer_and_soon(rm_type, name, monkeypatch):
    monkeypatch.setattr(policy, "FAILURES", policy.FailureCount())
    text = LONG[name]
    for response in (text, f"</think>\\boxed{{{text}}}", f"</think>\\boxed{{{text[:450]}}}", f"Answer: {text[:200]}"):
        sample = Sample(index=1, response=response, label="31/7")
        args = Namespace(rm_type=rm_type, custom_rm_path=None, rm_timeout_s=50.0)
        reward = asyncio.run(async_rm(args, sample))
        assert "reward_error" not in sample.metadata
        assert (reward["score"] == -1.0) if rm_type == "dapo" else reward < 0.1
        if rm_type == "math":
            assert asyncio.run(async_rm(args, Sample(response="\\boxed{31/7}", label=text))) == 0
    assert policy.FAILURES.total == 0


@pytest.mark.parametrize("rm_type", ["math", "deepscaler", "dapo", "gpqa"])
def test_the_answer_at_the_end_of_a_long_thought_counts(rm_type):
    thought = "Let x be 3, \\boxed{8} no: \\frac{1}{2} {([ </think> (B) is wrong. " * 10_000
    response = f"<think>{thought}</think> The answer is A \\boxed{{31/7}}\nAnswer: 31/7"
    label = "A" if rm_type == "gpqa" else "31/7"
    reward = asyncio.run(
        async_rm(Namespace(rm_type=rm_type, custom_rm_path=None), Sample(response=response, label=label))
    )
    assert (reward["score"] if rm_type == "dapo" else reward) == 1
