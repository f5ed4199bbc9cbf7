"""Creates the data of the examples that use tools.

    python examples/tiny_tools/make_task.py --output runs/tiny/tools

writes ``facts.txt`` (the search corpus), ``search.jsonl``, ``python.jsonl`` and ``sums.jsonl`` (prompt and label),
with an ``*_eval.jsonl`` (held out) and ``*_eval.yaml`` (sampling) for each, and ``sft.jsonl``, conversations of a weak
teacher for examples/tiny_tools/warm-start.sh.  ``--task agents`` writes ``sft.jsonl``, ``calls.jsonl``,
``orders.jsonl`` and ``code.jsonl``, the last three also with held-out files; ``--task gym`` writes ``sft.jsonl``.  The
files depend only on ``--seed``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny_arithmetic import task as sums  # noqa: E402
from examples.tiny_tools import agents, gym, task  # noqa: E402

SFT_ROWS = {"search": 5120, "python": 5120, "judge": 2560, "sums": 2560}
"""Rows of the warm start by kind; the sums maintain what the model has already learned."""
AGENT_SFT_ROWS = 10240
"""Rows of each kind of examples/tiny_tools/agents.py; half as many do not teach copying a tool's result."""
NUM_PROMPTS = 1024
NUM_EVAL_PROMPTS = 128
SFT_SUMS = sums.Demonstrations(num_rows=SFT_ROWS["sums"], worked_share=0.4, slip_rate=0.08)

EVAL_CONFIG = """\
eval:
  defaults:
    input_key: prompt
    label_key: label
    apply_chat_template: {template}
    n_samples_per_eval_prompt: {samples}
    max_response_len: 256
  datasets:
    - name: {name}
      path: {path}
      temperature: 1.0
    - name: {name}_greedy
      path: {path}
      temperature: 0.0
      n_samples_per_eval_prompt: 1
"""
EVALS = {"search": ("true", 4), "python": ("true", 1), "sums": ("false", 1)}
"""Data set -> (``apply_chat_template``, samples per prompt).  examples/multi_agent applies the template itself."""


def _write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def search_prompts(people: list[task.Person]) -> list[dict]:
    """Return a question about every person, with the code of their pet as label."""
    return [{"prompt": task.search_question(one), "label": one.code} for one in people]


def python_prompts(count: int, rng: random.Random) -> list[dict]:
    """Return ``count`` different products."""
    drawn: dict[str, str] = {}
    while len(drawn) < count:
        a, b = task.factors(rng)
        drawn[task.product_question(a, b)] = str(a * b)
    return [{"prompt": question, "label": label} for question, label in drawn.items()]


def make_task(output: Path, seed: int) -> dict[str, int]:
    """Write the folder; return the number of rows of each file."""
    output.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    people = task.make_people(seed)
    (output / "facts.txt").write_text("\n".join(task.facts(people)) + "\n")
    operands = sums.split_operands(
        {"sft": SFT_ROWS["sums"], "judge": SFT_ROWS["judge"], "rl": NUM_PROMPTS, "eval": 128}, seed
    )
    sft = [row for start in range(seed + 1, seed + 41) for row in task.search_rows(task.make_people(start), 128, rng)]
    sft += task.product_rows(SFT_ROWS["python"], rng) + task.judge_rows(operands["judge"], rng)
    sft += sums.sft_rows(operands["sft"], (SFT_SUMS,), seed)
    rng.shuffle(sft)
    products = python_prompts(NUM_PROMPTS + NUM_EVAL_PROMPTS, rng)
    questions = search_prompts(people)
    files = {
        "sft": sft,
        "search": questions[NUM_EVAL_PROMPTS // 4 :],
        "search_eval": questions[: NUM_EVAL_PROMPTS // 4],
        "python": products[NUM_EVAL_PROMPTS:],
        "python_eval": products[:NUM_EVAL_PROMPTS],
        "sums": sums.prompt_rows(operands["rl"]),
        "sums_eval": sums.prompt_rows(operands["eval"]),
    }
    return _write(output, files, EVALS)


def make_agents(output: Path, seed: int) -> dict[str, int]:
    """Write the folder of examples/strands, tau-bench and coding_agent_rl; return the number of rows of each file."""
    rng = random.Random(seed)
    files = {"sft": agents.sft_rows(AGENT_SFT_ROWS, rng)}
    for name, rows in agents.prompt_rows(NUM_PROMPTS + NUM_EVAL_PROMPTS // 2, rng).items():
        files[name] = rows[NUM_EVAL_PROMPTS // 2 :]
        files[f"{name}_eval"] = rows[: NUM_EVAL_PROMPTS // 2]
    return _write(output, files, {"calls": ("false", 1), "orders": ("true", 1), "code": ("false", 1)})


def make_gym(output: Path, seed: int) -> dict[str, int]:
    """Write the demonstrations for examples/run-tiny-gym.sh, which generates its questions while it runs."""
    return _write(output, {"sft": gym.sft_rows(random.Random(seed))}, {})


def _write(output: Path, files: dict[str, list[dict]], evals: dict[str, tuple[str, int]]) -> dict[str, int]:
    output.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        _write_rows(output / f"{name}.jsonl", rows)
    for name, (template, samples) in evals.items():
        path = (output / f"{name}_eval.jsonl").absolute()
        config = EVAL_CONFIG.format(name=name, path=path, template=template, samples=samples)
        (output / f"{name}_eval.yaml").write_text(config)
    return {name: len(rows) for name, rows in files.items()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=7, help="of all random choices")
    kinds = {"tools": make_task, "agents": make_agents, "gym": make_gym}
    parser.add_argument("--task", choices=kinds, default="tools", help="which questions")
    options = parser.parse_args()
    print(f"task: wrote {options.output}: rows {kinds[options.task](options.output, options.seed)}")


if __name__ == "__main__":
    main()
