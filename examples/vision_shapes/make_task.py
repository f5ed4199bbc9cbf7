"""Make what the example starts from: a random model with tokenizer and processor, and pictures with questions.

    python examples/vision_shapes/make_task.py --output runs/tiny/shapes/task

writes ``hf/``, ``data/sft.jsonl`` (conversations, in the order of the curriculum), ``data/grpo.jsonl`` and
``data/eval.jsonl`` (prompt, picture, label), the latter two also as ``*_wrong.jsonl``, where each question has the
picture of another, ``eval.yaml``, ``eval_wrong.yaml``, and ``task.json``, which says what was made.  When it already
says the same, nothing is done.  The files depend on ``--seed`` alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny_arithmetic.make_task import EVAL_CONFIG  # noqa: E402
from examples.vision_shapes import model, task  # noqa: E402

FORMAT = 1
"""Raised when what the files hold changes, so that older folders are made again."""

BATCH_ROWS = 64
"""Of one step of the warm start."""
CURRICULUM = ((400 * BATCH_ROWS, 1.0, 0.0), (40 * BATCH_ROWS, 0.4, 0.08))
"""Rows, share of worked answers, slips: seeing and counting first, then a weak teacher, for a weak policy."""
SIZES = {"eval": 128, "grpo": 1024, "sft": sum(rows for rows, _, _ in CURRICULUM)}


def make_task(output: Path, seed: int, sizes: dict[str, int] | None = None) -> dict:
    """Write the whole folder; gives the manifest that ``task.json`` holds."""
    rng = random.Random(seed)
    scenes = task.split_scenes(sizes or SIZES, seed)
    files, begin = {"sft": list[dict]()}, 0
    for rows, worked_share, slip_rate in CURRICULUM:
        files["sft"] += task.sft_rows(scenes["sft"][begin : begin + rows], worked_share, slip_rate, rng)
        begin += rows
    for name in ("grpo", "eval"):
        files |= {name: task.prompt_rows(scenes[name])}
        files |= {f"{name}_wrong": task.prompt_rows(scenes[name], wrong_images=True)}
    (output / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (output / f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("eval", "eval_wrong"):
        path = (output / f"data/{name}.jsonl").absolute()
        (output / f"{name}.yaml").write_text(EVAL_CONFIG.format(path=path))
    num_parameters = model.write_model(output / "hf", seed + 2)
    manifest = {"format": FORMAT, "seed": seed, "rows": sizes or SIZES, "parameters": num_parameters}
    (output / "task.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=2026, help="of the pictures, the demonstrations and the model")
    options = parser.parse_args()
    manifest_path = options.output / "task.json"
    if manifest_path.exists():
        made = json.loads(manifest_path.read_text())
        if (made.get("format"), made.get("seed")) == (FORMAT, options.seed):
            print(f"task: {options.output} is there already ({made['rows']} rows)")
            return
    made = make_task(options.output, options.seed)
    print(f"task: wrote {options.output}: rows {made['rows']}, a model of {made['parameters']:,} parameters")


if __name__ == "__main__":
    main()
