"""Questions, worked answers, and the three disjoint sets of them.

A question is a sum of five digits, wanted modulo ten::

    7+2+9+4+8 mod 10

Its worked answer names each operand and the running sum behind it, then boxes the last sum::

    7 29 98 42 80 \\boxed{0}

A guess boxes a digit at once.  Of the 100,000 questions a model sees a few thousand; guessing right without working
stays at one in ten.  So there is something to learn: first that working pays, then to add without slips.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NUM_OPERANDS = 5
MODULUS = 10

Operands = tuple[int, ...]


@dataclass(frozen=True)
class Demonstrations:
    """A stretch of the SFT file: how many rows, and how good a teacher they show."""

    num_rows: int
    worked_share: float
    """The share of worked answers; the rest guess (right one time in ten)."""
    slip_rate: float
    """The chance that one addition is off by one or two; the error is carried on."""


def question(operands: Operands) -> str:
    """(7, 2, 9, 4, 8) -> ``7+2+9+4+8 mod 10``."""
    return "+".join(map(str, operands)) + f" mod {MODULUS}"


def answer(operands: Operands) -> str:
    """The right digit."""
    return str(sum(operands) % MODULUS)


def operands_of(text: str) -> Operands:
    """The operands that ``question`` was made of."""
    return tuple(int(part) for part in text.removesuffix(f" mod {MODULUS}").split("+"))


def worked_answer(operands: Operands, rng: random.Random, slip_rate: float = 0.0) -> str:
    """Operand and running sum, step by step, then the box.  Slips are drawn from ``rng``."""
    total = operands[0]
    steps = [str(total)]
    for operand in operands[1:]:
        total += operand
        if slip_rate and rng.random() < slip_rate:
            total += rng.choice((-2, -1, 1, 2))
        total %= MODULUS
        steps.append(f"{operand}{total}")
    return " ".join(steps) + f" \\boxed{{{total}}}"


def guess(rng: random.Random) -> str:
    """A box around a random digit."""
    return f"\\boxed{{{rng.randrange(MODULUS)}}}"


def split_operands(sizes: dict[str, int], seed: int) -> dict[str, list[Operands]]:
    """name -> that many operand tuples; no tuple occurs twice, in one set or in two."""
    rng = random.Random(seed)
    numbers = rng.sample(range(MODULUS**NUM_OPERANDS), sum(sizes.values()))
    drawn = [tuple(number // MODULUS**place % MODULUS for place in range(NUM_OPERANDS)) for number in numbers]
    sets, start = {}, 0
    for name, size in sizes.items():
        sets[name] = drawn[start : start + size]
        start += size
    return sets


def sft_rows(operands: list[Operands], curriculum: tuple[Demonstrations, ...], seed: int) -> list[dict]:
    """Chat rows in the order they are to be learned: ``{"messages": [user, assistant]}``."""
    rng = random.Random(seed)
    rows = []
    stretches = [stretch for stretch in curriculum for _ in range(stretch.num_rows)]
    for numbers, stretch in zip(operands, stretches, strict=True):
        is_worked = rng.random() < stretch.worked_share
        reply = worked_answer(numbers, rng, stretch.slip_rate) if is_worked else guess(rng)
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": question(numbers)},
                    {"role": "assistant", "content": reply},
                ]
            }
        )
    return rows


def prompt_rows(operands: list[Operands]) -> list[dict]:
    """Rows for reinforcement learning and evaluation: ``{"prompt": text, "label": digit}``."""
    return [{"prompt": question(numbers), "label": answer(numbers)} for numbers in operands]
