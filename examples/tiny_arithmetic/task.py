"""Questions, worked answers, and disjoint data sets of them.

A question is a sum of five digits modulo ten::

    7+2+9+4+8 mod 10

The worked answer lists each operand followed by the running sum, and then boxes the last sum::

    7 29 98 42 80 \\boxed{0}

A guess boxes a digit immediately.  A model sees a few thousand of the 100,000 questions, so a guess is right one time
in ten.  There is something to learn: first that working pays, then to add without slips.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NUM_OPERANDS = 5
MODULUS = 10

Operands = tuple[int, ...]


@dataclass(frozen=True)
class Demonstrations:
    """A section of the SFT file: its number of rows, and the quality of its teacher."""

    num_rows: int
    worked_share: float
    """Fraction of worked answers; the others are guesses, right one time in ten."""
    slip_rate: float
    """Probability that an addition is off by one or two; the error propagates."""


def question(operands: Operands) -> str:
    """Return the question, for example (7, 2, 9, 4, 8) -> ``7+2+9+4+8 mod 10``."""
    return "+".join(map(str, operands)) + f" mod {MODULUS}"


def answer(operands: Operands) -> str:
    """Return the right digit."""
    return str(sum(operands) % MODULUS)


def operands_of(text: str) -> Operands:
    """Return the operands of a question."""
    return tuple(int(part) for part in text.removesuffix(f" mod {MODULUS}").split("+"))


def worked_answer(operands: Operands, rng: random.Random, slip_rate: float = 0.0) -> str:
    """Return the worked answer: operand and running sum for each step, then the box.  Slips are drawn from ``rng``."""
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
    """Return a box with a random digit."""
    return f"\\boxed{{{rng.randrange(MODULUS)}}}"


def split_operands(sizes: dict[str, int], seed: int) -> dict[str, list[Operands]]:
    """Return name -> list of ``sizes[name]`` operand tuples; no tuple occurs twice, within or across sets."""
    rng = random.Random(seed)
    numbers = rng.sample(range(MODULUS**NUM_OPERANDS), sum(sizes.values()))
    drawn = [tuple(number // MODULUS**place % MODULUS for place in range(NUM_OPERANDS)) for number in numbers]
    sets, start = {}, 0
    for name, size in sizes.items():
        sets[name] = drawn[start : start + size]
        start += size
    return sets


def sft_rows(operands: list[Operands], curriculum: tuple[Demonstrations, ...], seed: int) -> list[dict]:
    """Return chat rows in training order: ``{"messages": [user, assistant]}``."""
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
    """Return rows for reinforcement learning and evaluation: ``{"prompt": text, "label": digit}``."""
    return [{"prompt": question(numbers), "label": answer(numbers)} for numbers in operands]
