r"""Three kinds of agent tasks that the tiny model can learn, with a weak teacher for each.

* calls: ``347*28``; call a multiplication tool, then box its result (examples/strands);
* orders: ``cancel last order of Kiv``; look up the orders, cancel one, and say so (examples/tau-bench);
* code: ``f(a)=a*7+3``; write a Python block, and another one if the tests fail (examples/coding_agent_rl).

As in task.py, the teacher sometimes guesses, which leaves something for reinforcement learning to improve.
"""

from __future__ import annotations

import json
import random
from typing import Any

from examples.tiny_tools import task

SLIP_SHARE = task.GUESS_SHARE
ORDERS_OF_A_USER = 3
FIRST_SFT_TASK = 1_000_000
"""Order tasks from this index on are used only in demonstrations."""
WRONG = "wrong"
"""Message of a program's failed tests."""


def call(name: str, **arguments: Any) -> str:
    """Return a tool call in the model's format."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, separators=(',', ':'))}</tool_call>"


def order_task(index: int) -> tuple[str, list[int]]:
    """Return the user of task ``index`` and their orders, of which the last must be canceled."""
    rng = random.Random(f"orders {index}")
    name = rng.choice(task._FIRST) + rng.choice(task._VOWELS) + rng.choice(task._LAST)
    return name, rng.sample(range(10, 100), ORDERS_OF_A_USER)


def order_request(name: str) -> str:
    """Return the user's first message."""
    return f"cancel last order of {name}"


def program(a: int, b: int, sign: str) -> str:
    """Return the block of Python that the model writes."""
    return f"```python\ndef f(a): return a*{a}{sign}{b}\n```"


def code_row(a: int, b: int, sign: str) -> dict[str, Any]:
    """Return a prompt row with the test file for its answer."""
    values = [number * a + (b if sign == "+" else -b) for number in range(5)]
    test = f"from f import f\nassert [f(a) for a in range(5)] == {values}, {WRONG!r}\n"
    question = f"f(a)=a*{a}{sign}{b}"
    metadata = {"question": question, "files": {"test_f.py": test}, "test": "python3 -B test_f.py"}
    return {"prompt": question, "label": "", "metadata": metadata}


def prompt_rows(count: int, rng: random.Random) -> dict[str, list[dict[str, Any]]]:
    """Return ``count`` prompts of each kind; calls and code have no duplicates."""
    products: dict[str, str] = {}
    while len(products) < count:
        a, b = task.factors(rng)
        products[task.product_question(a, b)] = str(a * b)
    codes = [(a, b, sign) for a in range(2, 100) for b in range(1, 100) for sign in "+-"]
    return {
        "calls": [{"prompt": q, "label": label, "metadata": {"question": q}} for q, label in products.items()],
        "orders": [
            {"prompt": order_request(order_task(i)[0]), "label": "", "metadata": {"task_index": i}}
            for i in range(count)
        ],
        "code": [code_row(*one) for one in rng.sample(codes, count)],
    }


def sft_rows(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return ``count`` demonstrations of each kind, shuffled."""
    rows = [_row(*make(rng)) for make in (_call_turns, _code_turns) for _ in range(count)]
    rows += [_row(*_order_turns(FIRST_SFT_TASK + index, rng)) for index in range(count)]
    rng.shuffle(rows)
    return rows


def _call_turns(rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    a, b = task.factors(rng)
    if rng.random() < SLIP_SHARE:
        return task.product_question(a, b), [("assistant", task.boxed(str(rng.randrange(1000, 100_000))))]
    turns = [("assistant", call("multiply", a=a, b=b)), ("tool", str(a * b)), ("assistant", task.boxed(str(a * b)))]
    return task.product_question(a, b), turns


def _order_turns(index: int, rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    name, orders = order_task(index)
    chosen = rng.choice(orders) if rng.random() < SLIP_SHARE else orders[-1]
    turns = [("assistant", call("get_orders", user=name)), ("tool", " ".join(map(str, orders)))]
    turns += [("assistant", call("cancel_order", order=chosen)), ("tool", "ok"), ("assistant", "done")]
    return order_request(name), turns


def _code_turns(rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    a, b, sign = rng.randrange(2, 100), rng.randrange(1, 100), rng.choice("+-")
    right = [("assistant", program(a, b, sign))]
    if rng.random() < SLIP_SHARE:
        slip = [("assistant", program(a, rng.randrange(1, 100), sign)), ("user", WRONG)]
        right = [*slip, *right] if rng.random() < 0.5 else slip[:1]
    return f"f(a)=a*{a}{sign}{b}", right


def _row(question: str, turns: list[tuple[str, str]]) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages + [{"role": role, "content": content} for role, content in turns]}
