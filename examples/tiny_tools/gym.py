"""Sums of reasoning-gym (``chain_sum``) that the tiny model can learn, with a weak teacher.

The teacher writes the running totals and then the last one as the answer::

    State the final answer to the following arithmetic problem: 3 - 7 =
    3 -4 <answer>-4</answer>

As in tiny_arithmetic/task.py, it makes no errors at first; later it often guesses and sometimes slips.
"""

from __future__ import annotations

import random
import re
from typing import Any

from examples.tiny_arithmetic.task import Demonstrations
from slime.ext.environments.gym import read_task

TASK = "gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
SEED = 2_000_000
"""Seed of the demonstrations' questions; examples/run-tiny-gym.sh uses other seeds."""
CURRICULUM = (
    Demonstrations(num_rows=360 * 64, worked_share=1.0, slip_rate=0.0),
    Demonstrations(num_rows=40 * 64, worked_share=0.4, slip_rate=0.08),
)
_TERM = re.compile(r"([+-]?) ?(\d+)")


def terms_of(question: str) -> list[int]:
    """Return the signed terms of a question."""
    return [int(sign + digits) for sign, digits in _TERM.findall(question.partition(":")[2])]


def worked_answer(terms: list[int], rng: random.Random, slip_rate: float = 0.0) -> str:
    """Return the running totals, then the last one in the scorer's answer tags.  Slips are drawn from ``rng``."""
    total, *later = terms
    totals = [total]
    for term in later:
        total += term
        if slip_rate and rng.random() < slip_rate:
            total += rng.choice((-2, -1, 1, 2))
        totals.append(total)
    return " ".join(map(str, totals)) + f" <answer>{total}</answer>"


def guess(rng: random.Random) -> str:
    """Return a random answer within the range of possible answers."""
    return f"<answer>{rng.randrange(-9, 19)}</answer>"


def sft_rows(rng: random.Random) -> list[dict[str, Any]]:
    """Return chat rows in training order."""
    stretches = [stretch for stretch in CURRICULUM for _ in range(stretch.num_rows)]
    questions = read_task(f"{TASK}&size={len(stretches)}&seed={SEED}", slice(None), "--task")
    rows = []
    for (_, asked), stretch in zip(questions, stretches, strict=True):
        question, is_worked = asked["input"], rng.random() < stretch.worked_share
        reply = worked_answer(terms_of(question), rng, stretch.slip_rate) if is_worked else guess(rng)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        rows.append({"messages": messages})
    return rows
