"""The task ``needle_haystack`` of reasoning-gym: prompts with answers, and its own scorer as the reward plug-in.

    python examples/real_model/task.py --output runs/real_model/data

    --custom-rm-path examples.real_model.task.reward

A question has three statements ("Tayo tolerates hiking.") and asks whom one of them is about; two worked examples come
before it as turns of the chat.  The scorer compares names; nothing that the policy writes is evaluated.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from argparse import Namespace
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

END_OF_TURN = "<|im_end|>"
SYSTEM = "Answer with one name."
STATEMENTS, STATEMENTS_OF_EXAMPLES = 3, 2
SEEDS = {"examples": 1, "train": 1_000_000, "held_out": 2_000_000}
"""Row k of a set is drawn from ``seed + k``: sets of fewer than a million rows have no row in common."""


@cache
def load_task() -> Any:
    """Import the task's module alone: the whole package needs eleven others, of which three need a compiler."""
    package = importlib.util.find_spec("reasoning_gym")
    if package is None:
        sys.exit("reasoning-gym is not installed: scripts/demo_real.sh does that")
    [root] = package.submodule_search_locations or []
    for name in ("reasoning_gym", "reasoning_gym.cognition"):
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(Path(root, *name.split(".")[1:]))]
        sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    return importlib.import_module("reasoning_gym.cognition.needle_haystack")


def entries(name: str, number: int, statements: int = STATEMENTS) -> list[dict[str, Any]]:
    """Questions and answers of one of the sets."""
    task = load_task()
    config = task.NeedleHaystackConfig(
        min_num_statements=statements, max_num_statements=statements, seed=SEEDS[name], size=number
    )
    data_set = task.NeedleHaystackDataset(config)
    return [data_set[place] for place in range(number)]


def rows(name: str, number: int) -> list[dict[str, Any]]:
    """Rows of a data file: chat messages, and the name that is right."""
    turns = [{"role": "system", "content": SYSTEM}]
    for shown in entries("examples", 2, STATEMENTS_OF_EXAMPLES):
        turns += [{"role": "user", "content": shown["question"]}, {"role": "assistant", "content": shown["answer"]}]
    return [
        {"prompt": [*turns, {"role": "user", "content": entry["question"]}], "label": entry["answer"]}
        for entry in entries(name, number)
    ]


def grade(response: str, label: str) -> float:
    """The package's score, in [0, 1]: 1 for the name alone, however it is spaced or capitalised."""
    answer = response.removesuffix(END_OF_TURN)
    return load_task().NeedleHaystackDataset.score_answer(None, answer, {"answer": label})


async def reward(args: Namespace, sample: Any, **kwargs: Any) -> float | list[float]:
    """The plug-in: one sample gives a number, a list of samples gives a list."""
    if isinstance(sample, list):
        return [grade(one.response, one.label) for one in sample]
    return grade(sample.response, sample.label)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of train.jsonl and held_out.jsonl")
    parser.add_argument("--train", type=int, default=8000, help="rows to train on")
    parser.add_argument("--held-out", type=int, default=512, help="rows to evaluate on")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name, number in (("train", options.train), ("held_out", options.held_out)):
        text = "".join(json.dumps(row) + "\n" for row in rows(name, number))
        (options.output / f"{name}.jsonl").write_text(text)
        print(f"{options.output / name}.jsonl: {number} rows")


if __name__ == "__main__":
    main()
