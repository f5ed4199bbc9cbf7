"""Make the data sets of examples/eval_multi_task/multi_task.yaml.in.

python examples/eval_multi_task/make_data.py --output runs/tiny/multi-task
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny_arithmetic import task  # noqa: E402

NUM_PROMPTS = 128
NUM_CHOICES = 4
TEMPLATE = Path(__file__).with_name("multi_task.yaml.in")


def choice_rows(operands: list[task.Operands], rng: random.Random) -> list[dict]:
    """Return rows for the ``gpqa`` grader, with the choices and the right letter in a separate column."""
    rows = []
    for numbers in operands:
        right = task.answer(numbers)
        wrong = rng.sample([digit for digit in string.digits if digit != right], NUM_CHOICES - 1)
        choices = sorted([right, *wrong])
        letter = string.ascii_uppercase[choices.index(right)]
        info = {"choices": choices, "correct_letter": letter, "correct_answer": right}
        rows.append({"prompt": task.question(numbers), "label": letter, "info": info})
    return rows


def first_step_rows(operands: list[task.Operands]) -> list[dict]:
    """Return rows whose label is the first word of a worked answer, which is the first operand."""
    return [{"prompt": task.question(numbers), "label": str(numbers[0])} for numbers in operands]


def make_data(output: Path, seed: int) -> None:
    """Write the data and the YAML file of the evaluation."""
    output.mkdir(parents=True, exist_ok=True)
    names = ("sums", "choice", "first_step")
    operands = task.split_operands(dict.fromkeys(names, NUM_PROMPTS), seed)
    files = {
        "sums": task.prompt_rows(operands["sums"]),
        "choice": choice_rows(operands["choice"], random.Random(seed)),
        "first_step": first_step_rows(operands["first_step"]),
    }
    for name, rows in files.items():
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (output / "multi_task.yaml").write_text(TEMPLATE.read_text().replace("DATA", str(output.absolute())))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=11, help="of the questions")
    options = parser.parse_args()
    make_data(options.output, options.seed)
    print(f"data: wrote {options.output}")


if __name__ == "__main__":
    main()
