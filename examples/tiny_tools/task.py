"""Three kinds of questions that the tiny model cannot answer alone, with a weak teacher for each.

* search: ``code of pet of Kiv``; two look-ups in a table of facts, then the code in a box;
* python: ``347*28``; a product that a model with 0.3 million parameters cannot compute, but a program can;
* judge: ``7+2+9+4+8 mod 10 answers 0 3 0``; which of several solvers' answers is right.

The teacher sometimes guesses immediately, so a policy trained on it uses its tool only sometimes, which leaves
something for reinforcement learning to improve.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from examples.tiny_arithmetic import task as sums

PERSONS = 120
GUESS_SHARE = 0.45
"""Fraction of the teacher's answers that box a guess immediately."""
NUM_SOLVERS = 3

_FIRST, _VOWELS, _LAST = "BDFGKLMNPRSTVZ", "aeiou", "bdfgklmnprstvz"


@dataclass(frozen=True)
class Person:
    """One row of the table.  No pet has a person's name, so two search words identify one fact."""

    name: str
    pet: str
    code: str
    """Two-digit code of the pet."""


def make_people(seed: int) -> list[Person]:
    """Return the table of persons and their pets."""
    rng = random.Random(seed)
    names = rng.sample([a + b + c for a in _FIRST for b in _VOWELS for c in _LAST], 2 * PERSONS)
    return [Person(*pair, f"{rng.randrange(100):02d}") for pair in zip(names[::2], names[1::2], strict=True)]


def facts(people: list[Person]) -> list[str]:
    """Return the search corpus, one document per fact."""
    return [text for one in people for text in (f"pet of {one.name} is {one.pet}", f"code of {one.pet} is {one.code}")]


def boxed(text: str) -> str:
    """Return an answer in a box."""
    return f"\\boxed{{{text}}}"


def search_question(person: Person) -> str:
    return f"code of pet of {person.name}"


def search_turns(person: Person) -> list[dict[str, str]]:
    """Return the teacher's turns: two searches, then the code."""
    return [
        {"role": "assistant", "content": f"<search>pet {person.name}</search>"},
        {"role": "tool", "content": f"pet of {person.name} is {person.pet}"},
        {"role": "assistant", "content": f"<search>code {person.pet}</search>"},
        {"role": "tool", "content": f"code of {person.pet} is {person.code}"},
        {"role": "assistant", "content": boxed(person.code)},
    ]


def product_question(a: int, b: int) -> str:
    return f"{a}*{b}"


def product_turns(a: int, b: int) -> list[dict[str, str]]:
    """Return the teacher's turns: a program, its output, the answer."""
    return [
        {"role": "assistant", "content": f"```python\nprint({a}*{b})\n```"},
        {"role": "tool", "content": f"{a * b}"},
        {"role": "assistant", "content": boxed(str(a * b))},
    ]


def judge_question(question: str, answers: list[str]) -> str:
    """Return the prompt of the judge; an unreadable answer is ``?``."""
    return f"{question} answers {' '.join(answers)}"


def judge_rows(operands: list[sums.Operands], rng: random.Random) -> list[dict]:
    """Return rows that teach a judge to choose the most frequent answer; as a weak teacher, 30 % choose at random."""
    rows = []
    for numbers in operands:
        right = sums.answer(numbers)
        answers = [right if rng.random() < 0.6 else str(rng.randrange(10)) for _ in range(NUM_SOLVERS)]
        choice = max(answers, key=answers.count) if rng.random() < 0.7 else rng.choice(answers)
        rows.append(
            _row(judge_question(sums.question(numbers), answers), [{"role": "assistant", "content": boxed(choice)}])
        )
    return rows


def search_rows(people: list[Person], count: int, rng: random.Random) -> list[dict]:
    """Return demonstrations of search; with tables that differ from the corpus, they teach searching but no facts."""
    rows = []
    for _ in range(count):
        person = rng.choice(people)
        turns = search_turns(person)
        if rng.random() < GUESS_SHARE:
            turns = [{"role": "assistant", "content": boxed(f"{rng.randrange(100):02d}")}]
        rows.append(_row(search_question(person), turns))
    return rows


def product_rows(count: int, rng: random.Random) -> list[dict]:
    """Return demonstrations of computing products with a program."""
    rows = []
    for _ in range(count):
        a, b = factors(rng)
        turns = product_turns(a, b)
        if rng.random() < GUESS_SHARE:
            turns = [{"role": "assistant", "content": boxed(str(rng.randrange(1000, 100_000)))}]
        rows.append(_row(product_question(a, b), turns))
    return rows


def factors(rng: random.Random) -> tuple[int, int]:
    """Return two numbers with three and two digits."""
    return rng.randrange(100, 1000), rng.randrange(10, 100)


def _row(question: str, turns: list[dict[str, str]]) -> dict:
    return {"messages": [{"role": "user", "content": question}, *turns]}
