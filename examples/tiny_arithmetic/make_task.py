"""Creates everything that the tiny job starts from: tokenizer, random model, data files.

    python examples/tiny_arithmetic/make_task.py --output runs/tiny

writes ``hf/`` (a Hugging Face folder), ``data/sft.jsonl`` (chat rows, in curriculum order), ``data/grpo.jsonl`` and
``data/eval.jsonl`` (prompt and label), ``eval.yaml`` (sampling of the held-out prompts), and ``task.json``, a
manifest.  Nothing is written if ``task.json`` already has the same format and seed.  The files depend only on
``--seed``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny_arithmetic import model, task  # noqa: E402
from examples.tiny_arithmetic.tokenizer import build_tokenizer  # noqa: E402

FORMAT = 3
"""Increase this when the content of the files changes, so that older folders are created again."""

BATCH_ROWS = 64
"""Rows of one SFT step (``--rollout-batch-size`` of the warm start)."""

CURRICULUM = (
    task.Demonstrations(num_rows=200 * BATCH_ROWS, worked_share=1.0, slip_rate=0.0),
    task.Demonstrations(num_rows=40 * BATCH_ROWS, worked_share=0.4, slip_rate=0.08),
)
"""First clean worked sums, to learn addition; then a weak teacher, to get a weak policy."""

NUM_SFT_STEPS = sum(stretch.num_rows for stretch in CURRICULUM) // BATCH_ROWS
NUM_GRPO_PROMPTS = 8192
NUM_EVAL_PROMPTS = 512

EVAL_CONFIG = """\
# The held-out prompts twice: sampled as in training, and greedily.
eval:
  defaults:
    input_key: prompt
    label_key: label
    apply_chat_template: true
    n_samples_per_eval_prompt: 1
    max_response_len: 32
  datasets:
    - name: held_out
      path: {path}
      temperature: 1.0
    - name: held_out_greedy
      path: {path}
      temperature: 0.0
"""


def _write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_task(output: Path, seed: int) -> dict:
    """Write the whole folder; return the manifest in ``task.json``."""
    num_sft_rows = sum(stretch.num_rows for stretch in CURRICULUM)
    sizes = {"eval": NUM_EVAL_PROMPTS, "grpo": NUM_GRPO_PROMPTS, "sft": num_sft_rows}
    sets = task.split_operands(sizes, seed)
    _write_rows(output / "data/sft.jsonl", task.sft_rows(sets["sft"], CURRICULUM, seed + 1))
    _write_rows(output / "data/grpo.jsonl", task.prompt_rows(sets["grpo"]))
    _write_rows(output / "data/eval.jsonl", task.prompt_rows(sets["eval"]))
    (output / "eval.yaml").write_text(EVAL_CONFIG.format(path=(output / "data/eval.jsonl").absolute()))
    build_tokenizer().save_pretrained(output / "hf")
    num_parameters = model.write_model(output / "hf", seed + 2)
    manifest = {"format": FORMAT, "seed": seed, "rows": sizes, "parameters": num_parameters}
    (output / "task.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=2026, help="of the split, the demonstrations and the model")
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
