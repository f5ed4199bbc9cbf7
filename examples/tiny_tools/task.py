"""Three kinds of questions that the tiny model cannot answer alone, and a weak teacher for each.

* search: ``code of pet of Kiv``; two look-ups in a table of facts, then the code in a box;
* python: ``347*28``; a product that a model of 0.3 million parameters cannot form, but a program can;
* judge: ``7+2+9+4+8 mod 10 answers 0 3 0``; which of the answers of several solvers is right.

The teacher sometimes guesses at once, so that a policy trained on it uses its tool only sometimes, and there is
something for reinforcement learning to do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from examples.tiny_arithmetic import task as sums

PERSONS = 120
GUESS_SHARE = 0.45
"""Answers of the teacher that box a guess at once."""
NUM_SOLVERS = 3

_FIRST, _VOWELS, _LAST = "BDFGKLMNPRSTVZ", "aeiou", "bdfgklmnprstvz"


@dataclass(frozen=True)
class Person:
    """One row of the table.  No pet has a person's name, so two words find one fact."""

    name: str
    pet: str
    code: str
    """Of the pet: two digits."""


def make_people(seed: int) -> list[Person]:
    """The table: every person with a pet."""
    rng = random.Random(seed)
    names = rng.sample([a + b + c for a in _FIRST for b in _VOWELS for c in _LAST], 2 * PERSONS)
    return [Person(*pair, f"{rng.randrange(100):02d}") for pair in zip(names[::2], names[1::2], strict=True)]


def facts(people: list[Person]) -> list[str]:
    """The documents that are searched, one a fact."""
    return [text for one in people for text in (f"pet of {one.name} is {one.pet}", f"code of {one.pet} is {one.code}")]


def boxed(text: str) -> str:
    """The answer's form."""
    return f"\\boxed{{{text}}}"


def search_question(person: Person) -> str:
    return f"code of pet of {person.name}"


def search_turns(person: Person) -> list[dict[str, str]]:
    """Return the turns of a teacher: two searches, then the code."""
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
    """A program, what it prints, the answer."""
    return [
        {"role": "assistant", "content": f"```python\nprint({a}*{b})\n```"},
        {"role": "tool", "content": f"{a * b}"},
        {"role": "assistant", "content": boxed(str(a * b))},
    ]


def judge_question(question: str, answers: list[str]) -> str:
    """Return the text for the judge; an answer that could not be read is ``?``."""
    return f"{question} answers {' '.join(answers)}"


def judge_rows(operands: list[sums.Operands], rng: random.Random) -> list[dict]:
    """Rows that teach a judge to take the answer that most solvers gave; a weak one names any of them."""
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
    """Demonstrations of search, over tables of invented people: only how to search can be learned, not the facts."""
    rows = []
    for _ in range(count):
        person = rng.choice(people)
        turns = search_turns(person)
        if rng.random() < GUESS_SHARE:
            turns = [{"role": "assistant", "content": boxed(f"{rng.randrange(100):02d}")}]
        rows.append(_row(search_question(person), turns))
    return rows


def product_rows(count: int, rng: random.Random) -> list[dict]:
    """Demonstrations of products by program."""
    rows = []
    for _ in range(count):
        a, b = factors(rng)
        turns = product_turns(a, b)
        if rng.random() < GUESS_SHARE:
            turns = [{"role": "assistant", "content": boxed(str(rng.randrange(1000, 100_000)))}]
        rows.append(_row(product_question(a, b), turns))
    return rows


def factors(rng: random.Random) -> tuple[int, int]:
    """Two numbers of three and two digits."""
    return rng.randrange(100, 1000), rng.randrange(10, 100)


def _row(question: str, turns: list[dict[str, str]]) -> dict:
    return {"messages": [{"role": "user", "content": question}, *turns]}
