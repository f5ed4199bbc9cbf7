"""Runs four unmodified recipes of tinker-cookbook against ``slime serve-training``: their first and last metrics.

    pip install -e '.[training-api]'
    pip install --no-deps --target COOKBOOK tinker_cookbook==0.6.1 blobfile chz pyrage termcolor tiktoken tml-renderers
    PYTHONPATH=COOKBOOK python benchmarks/training_recipes.py --out benchmarks/results/training_recipes_cpu.json

A random Qwen3 of 100 thousand parameters learns sums on the CPU: ``chat_sl`` from a file of conversations; ``math_rl``
(its arithmetic problems) to end its answers, starting from ``chat_sl``'s state; ``preference.shorter`` to give short
answers; ``preference.dpo`` from pairs of a right and a wrong sum, in a folder named like its data set on the hub.
Each is ``python -m`` with flags.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import results_page  # noqa: E402
from tests.e2e.tiny_qwen3 import save_tiny_model  # noqa: E402

START_S, RECIPE_S = 900, 1800
COLUMNS = ["recipe", "steps", "metric", "first", "last"]
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
SERVER = """
    --lora-rank 32 --max-tokens-per-gpu 4096 --training-api-pack-clients --actor-num-gpus-per-node 1
    --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1 --no-record
"""
RECIPES: dict[str, tuple[str, str]] = {
    # name -> flags, and the reported metrics
    "chat_sl": (
        "dataset={folder}/sums.jsonl learning_rate=1e-2 batch_size=128 max_length=512 save_every=2",
        "train_mean_nll",
    ),
    "math_rl": (
        "env=arithmetic load_checkpoint_path={state} loss_fn=importance_sampling learning_rate=3e-3 group_size=8 "
        "groups_per_batch=8 max_steps=12 save_every=0 eval_every=0",
        "env/all/correct env/all/format env/all/reward/total",
    ),
    "preference.shorter": (
        "batch_size=8 group_size=8 learning_rate=3e-3 max_tokens=32 max_steps=12 eval_every=0",
        "env/all/ac_tokens_per_turn",
    ),
    "preference.dpo": ("dataset=hhh learning_rate=1e-3 batch_size=32 max_length=512", "dpo_loss accuracy margin"),
}


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--conversations", type=int, default=128 * 8, help="of chat_sl; a step has 128")
    parser.add_argument("--pairs", type=int, default=32 * 8, help="of preference.dpo; a step has 32")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of the rows")
    return parser.parse_args()


def write_model(folder: Path) -> None:
    """Write the tiny model, whose tokenizer has Qwen's chat tokens."""
    save_tiny_model(folder, 1)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for number, token in enumerate(CHAT_TOKENS):
        vocabulary[token] = vocabulary.pop(f"<x{number}>")
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": vocabulary[token], "content": token, "special": True, **flags})
    file.write_text(json.dumps(tokenizer))


def write_data(folder: Path, num_conversations: int, num_pairs: int) -> None:
    """Write conversations with sums, and pairs of a right and a wrong sum in the format of the recipe's data set."""
    draw = random.Random(0)

    def numbers() -> tuple[int, int]:
        return draw.randint(0, 100), draw.randint(0, 100)

    with open(folder / "sums.jsonl", "w") as file:
        for _ in range(num_conversations):
            x, y = numbers()
            texts = ("What is 4 + 5?", "9", f"What is {x} + {y}?", str(x + y))
            turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
            file.write(json.dumps({"messages": turns}) + "\n")
    hub = folder / "Anthropic/hh-rlhf"
    hub.mkdir(parents=True)
    for split, count in (("train", num_pairs), ("test", 32)):
        with open(hub / f"{split}.jsonl", "w") as file:
            for _ in range(count):
                x, y = numbers()
                asked, wrong = f"\n\nHuman: What is {x} + {y}?\n\nAssistant: ", x + y + draw.randint(1, 9)
                pair = {"chosen": f"{asked}{x + y}", "rejected": f"{asked}It is {wrong}, I think."}
                file.write(json.dumps(pair) + "\n")


def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start the service; return it with its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--hf-checkpoint", str(folder / "model"), "--training-api-dir", str(folder / "states"), *SERVER.split()]
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "slime", "serve-training", *flags, "--training-api-port", str(port)],
            stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | {"RAY_ADDRESS": "local"},
            start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, f"http://127.0.0.1:{port}"
        if process.poll() is not None:
            break
        time.sleep(1)
    process.terminate()
    raise SystemExit(f"The service did not start:\n{(folder / 'server.log').read_text()[-3000:]}")


def run_recipe(name: str, model: Path, folder: Path, url: str) -> list[list[Any]]:
    """Run a recipe; return rows of its first and last numbers, each the median over a tenth of its steps."""
    flags, metrics = RECIPES[name]
    log = folder / name
    state = ""
    if "{state}" in flags:
        saved = (folder / "chat_sl/checkpoints.jsonl").read_text().splitlines()
        state = json.loads(saved[0])["state_path"]
    given = flags.format(folder=folder, state=state).split()
    common = [f"model_name={model}", "renderer_name=qwen3_instruct", f"log_path={log}"]
    environment = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-any", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}.train", *common, *given]
    subprocess.run(command, cwd=folder, check=True, timeout=RECIPE_S, env=environment)
    steps = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    rows = []
    for metric in metrics.split():
        values = [step[metric] for step in steps if metric in step]
        some = max(1, len(values) // 10)
        ends = (round(statistics.median(part), 3) for part in (values[:some], values[-some:]))
        rows.append([name, len(values), metric, *ends])
    return rows


def main() -> None:
    options = parse_options()
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        write_data(folder, options.conversations, options.pairs)
        server, url = start_server(folder)
        try:
            for recipe in options.recipes:
                rows += run_recipe(recipe, folder / "model", folder, url)
                print(rows, flush=True)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(120)
    if options.out is not None:
        run = {
            **{"title": "Recipes of tinker-cookbook 0.6.1 on the training service", "group": "Whole jobs"},
            **{"date": datetime.now(UTC).date().isoformat(), "hardware": results_page.find_hardware()},
            **{"versions": results_page.versions(), "command": shlex.join(["python", *sys.argv])},
            **{"commit": results_page.commit(), "notes": [f"{name}: {flags}" for name, (flags, _) in RECIPES.items()]},
            "tables": [{"title": "First and last steps", "columns": COLUMNS, "rows": rows}],
        }
        results_page.save(options.out.stem, run, options.out.parent)


if __name__ == "__main__":
    main()
