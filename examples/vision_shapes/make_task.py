"""Creates everything that the example starts from: random model, tokenizer, processor, and images with questions.

    python examples/vision_shapes/make_task.py --output runs/tiny/shapes/task

writes ``hf/``, ``data/sft.jsonl`` (conversations, in curriculum order), ``data/grpo.jsonl`` and ``data/eval.jsonl``
(prompt, image, label), the latter two also as ``*_wrong.jsonl``, in which each question has the image of another one,
``eval.yaml``, ``eval_wrong.yaml``, and ``task.json``, a manifest.  Nothing is written if ``task.json`` already has the
same format and seed.  The files depend only on ``--seed``.
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
"""Increase this when the content of the files changes, so that older folders are created again."""

BATCH_ROWS = 64
"""Rows of one step of the warm start."""
CURRICULUM = ((400 * BATCH_ROWS, 1.0, 0.0), (40 * BATCH_ROWS, 0.4, 0.08))
"""(rows, fraction of worked answers, slip rate): first seeing and counting, then a weak teacher for a weak policy."""
SIZES = {"eval": 128, "grpo": 1024, "sft": sum(rows for rows, _, _ in CURRICULUM)}


def make_task(output: Path, seed: int, sizes: dict[str, int] | None = None) -> dict:
    """Write the whole folder; return the manifest in ``task.json``."""
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
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=2026, help="of the images, the demonstrations and the model")
    options = parser.parse_args()
    manifest_path = options.output / "task.json"
    if manifest_path.exists():
        made = json.loads(manifest_path.read_text())
        if (made.get("format"), made.get("seed")) == (FORMAT, options.seed):
            print(f"task: {options.output} exists already ({made['rows']} rows)")
            return
    made = make_task(options.output, options.seed)
    print(f"task: wrote {options.output}: rows {made['rows']}, a model of {made['parameters']:,} parameters")


if __name__ == "__main__":
    main()
