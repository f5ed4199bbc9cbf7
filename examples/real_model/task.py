"""Tasks of reasoning-gym for a pretrained model: prompts with answers, and the package's scorers as reward.

    python examples/real_model/task.py --task needle_haystack --output runs/real_model/data

    --custom-rm-path examples.real_model.task.reward

``needle_haystack`` gives three statements ("Tayo tolerates hiking.") and asks which person one of them is about; two
worked examples precede it as chat turns.  ``TASKS`` has the other tasks.  The policy's output is never evaluated.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

END_OF_TURN = "<|im_end|>"
ANSWER = "<|im_start|>assistant"
"""Start of the last turn in a conversation with tools."""
SEEDS = {"examples": 1, "train": 1_000_000, "held_out": 2_000_000}
"""Row k of a set is drawn with seed ``SEEDS[set] + k``."""


@dataclass(frozen=True)
class Task:
    """A task and its prompt."""

    module: str
    """Module in reasoning_gym."""
    name: str
    """Prefix of its classes NameDataset and NameConfig."""
    config: dict[str, Any]
    system: str
    examples: dict[str, Any] = field(default_factory=dict)
    """Config of the two worked examples; empty if none are shown."""
    is_number: bool = False
    """Whether the answer is the last number in the last turn."""


def _needles(statements: int) -> dict[str, int]:
    return {"min_num_statements": statements, "max_num_statements": statements}


def _numbers(terms: tuple[int, int], digits: tuple[int, int]) -> dict[str, int]:
    return dict(zip(("min_terms", "max_terms", "min_digits", "max_digits"), (*terms, *digits), strict=True))


NUMBER = "Answer with the number alone."
TOOL = "Compute with the tool calculate. Then answer with the number alone."
TASKS = {
    "needle_haystack": Task(
        "cognition.needle_haystack", "NeedleHaystack", _needles(3), "Answer with one name.", examples=_needles(2)
    ),
    "chain_sum": Task("arithmetic.chain_sum", "ChainSum", _numbers((2, 3), (2, 3)), NUMBER, is_number=True),
    "products": Task("arithmetic.products", "Products", _numbers((2, 2), (1, 2)), NUMBER, is_number=True),
    "chain_sum_tool": Task("arithmetic.chain_sum", "ChainSum", _numbers((6, 8), (4, 6)), TOOL, is_number=True),
}


@cache
def load_task(module: str) -> Any:
    """Import only the task's module: the whole package requires eleven others, of which three need a compiler."""
    package = importlib.util.find_spec("reasoning_gym")
    if package is None:
        sys.exit("reasoning-gym is not installed; scripts/demo_real.sh installs it")
    [root] = package.submodule_search_locations or []
    for name in ("reasoning_gym", f"reasoning_gym.{module.partition('.')[0]}"):
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(Path(root, *name.split(".")[1:]))]
        sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    return importlib.import_module(f"reasoning_gym.{module}")


def entries(task: Task, name: str, number: int) -> list[dict[str, Any]]:
    """Return questions and answers of one of the sets in ``SEEDS``."""
    module, chosen = load_task(task.module), task.examples if name == "examples" else task.config
    config = getattr(module, f"{task.name}Config")(seed=SEEDS[name], size=number, **chosen)
    data_set = getattr(module, f"{task.name}Dataset")(config)
    return [data_set[place] for place in range(number)]


def rows(task_name: str, name: str, number: int, without: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Return rows of a data file: chat messages and the right answer, leaving out the prompts in ``without``."""
    task = TASKS[task_name]
    turns = [{"role": "system", "content": task.system}]
    for shown in entries(task, "examples", 2) if task.examples else []:
        turns += [{"role": "user", "content": shown["question"]}, {"role": "assistant", "content": shown["answer"]}]
    made = [
        {
            "prompt": [*turns, {"role": "user", "content": entry["question"]}],
            "label": entry["answer"],
            "metadata": {"task": task_name},
        }
        for entry in entries(task, name, number)
    ]
    left_out = {json.dumps(prompt) for prompt in without}
    return [row for row in made if json.dumps(row["prompt"]) not in left_out]


def grade(task_name: str, response: str, label: str) -> float:
    """Return 1 if the package's scorer gives the full score, else 0; partial scores do not count."""
    task = TASKS[task_name]
    answer = response.rpartition(ANSWER)[2].removesuffix(END_OF_TURN)
    if task.is_number:
        answer = (re.findall(r"-?\d[\d,]*(?:\.\d+)?", answer) or [""])[-1]
    scorer = getattr(load_task(task.module), f"{task.name}Dataset").score_answer
    return float(scorer(None, answer, {"answer": label}) == 1.0)


async def reward(args: Namespace, sample: Any, **kwargs: Any) -> float | list[float]:
    """``--custom-rm-path``: return a number for one sample, or a list for a list of samples."""
    if isinstance(sample, list):
        return [grade(one.metadata["task"], one.response, one.label) for one in sample]
    return grade(sample.metadata["task"], sample.response, sample.label)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(TASKS), default="needle_haystack", help="the task")
    parser.add_argument("--output", type=Path, required=True, help="folder of train.jsonl and held_out.jsonl")
    parser.add_argument("--train", type=int, default=8000, help="rows to train on")
    parser.add_argument("--held-out", type=int, default=512, help="rows to evaluate on")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    held_out = rows(options.task, "held_out", options.held_out)
    asked = [row["prompt"] for row in held_out]
    sets = {"train": rows(options.task, "train", options.train, without=asked), "held_out": held_out}
    for name, made in sets.items():
        (options.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        print(f"{options.output / name}.jsonl: {len(made)} rows")


if __name__ == "__main__":
    main()
