"""Scores answers to reasoning-gym questions with their tasks' own scorers.

Some scorers evaluate the policy's output as code.  All scorers therefore run in one child process, which is isolated
like a sandbox (``slime.agent.sandbox``) and killed if an answer takes too long.
"""

from __future__ import annotations

import atexit
import functools
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from slime.isolation.view import isolated_command, unsafe_command, view_for_programs
from slime.rollout.parsing import split_reasoning
from slime.rollout.rm_hub.symbolic import VARIABLES, SymbolicWorker, WorkerPool
from slime.utils import env
from slime.utils.errors import DataError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 10.0
"""Time limit for scoring one answer, including the generation of its question."""
MEMORY_BYTES = 4 << 30
DISK_MIB = 16

_WORKER_FILE = Path(__file__).with_name("gym_worker.py")
_ANSWER = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)


class QuestionWorker(SymbolicWorker):
    """A child process that generates questions (``gym_worker``)."""

    first_question = {"task": "leg_counting", "config": {"size": 1, "seed": 0}, "indices": [0]}
    what = "runs reasoning-gym"
    package = "reasoning_gym"
    needs_isolation = True

    def _start(self) -> subprocess.Popen[bytes]:
        return self._popen([sys.executable, str(_WORKER_FILE)], env=env.copy() | VARIABLES)


class ScoreWorker(QuestionWorker):
    """An isolated child process that scores answers."""

    def __init__(self, *, is_unsafe: bool = False, time_limit_s: float = TIME_LIMIT_S) -> None:
        super().__init__(time_limit_s=time_limit_s)
        self._is_unsafe = is_unsafe

    def _start(self) -> subprocess.Popen[bytes]:
        view = replace(view_for_programs("/tmp/gym", disk_mib=DISK_MIB), limits={"as": MEMORY_BYTES})
        words = unsafe_command(view) if self._is_unsafe else isolated_command(view)
        # Pass the source as text: the worker's file is not visible in the sandbox.
        program = [sys.executable, "-sPc", _WORKER_FILE.read_text(encoding="utf-8")]
        return self._start_by([*words, *program])


@functools.cache
def _pool(is_unsafe: bool) -> WorkerPool:
    pool = WorkerPool([ScoreWorker(is_unsafe=is_unsafe)])
    atexit.register(pool.close)
    return pool


def answer_of(response: str) -> str:
    """Return the last text in ``<answer>`` tags, or else the whole response without its reasoning."""
    said = split_reasoning(response)[1]
    # Unclosed tags after the last closing tag would make the search quadratic.
    tagged = _ANSWER.findall(said, 0, said.rfind("</answer>") + len("</answer>"))
    return str(tagged[-1] if tagged else said).strip()


def score(sample: Sample, *, is_unsafe: bool) -> float:
    """Return the task scorer's score of the answer, from 0 to 1; 0 if scoring times out or fails.

    Raises:
        DataError: the sample is not a reasoning-gym question.
        ConfigError: this machine cannot isolate programs, and ``--unsafe-local-sandbox`` is not set.
        GraderError: the child process did not start.
    """
    question = sample.metadata.get("gym")
    if question is None:
        raise DataError(f"Sample {sample.index} is not from --prompt-data gym:TASK; rm_type gym scores only those.")
    asked = {**question, "answer": answer_of(sample.response)}
    answered = _pool(is_unsafe).ask(asked)
    if not isinstance(answered, dict):
        return 0.0  # timed out
    if "error" in answered:
        why = answered["error"]
        logger.info("The scorer of %s refused the answer of sample %s: %s", asked["task"], sample.index, why)
    return float(answered.get("score", 0.0))
