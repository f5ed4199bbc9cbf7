"""The gain from asynchrony: the same work synchronous, one step ahead and fully asynchronous, on two GPUs.

    python benchmarks/asynchrony.py --out runs/asynchrony
    python benchmarks/asynchrony.py --out /tmp/a --model tiny --prompts 4 --median 12 --cap 64 -- --fp32   # a CPU
    python benchmarks/asynchrony.py --out /tmp/a --merge /tmp/b/numbers.json /tmp/c/numbers.json           # one table

Every mode is a whole job with random weights of the model's shape.  Response lengths follow a seeded trace
(log-normal, ``--median``, ``--sigma``, ``--cap``), depend only on the sample's index, and are forced; rewards
are random.  The rollouts from the second to the last but one are measured, from metric record to metric record:
trained response tokens per second, and for each GPU the share of time without a running kernel (NVML).

All jobs start at once and hold their first request until their turn, so that the start-up time is spent only once.
If two trainers do not fit on one GPU, run each mode separately, one after the other or on different GPUs
(``CUDA_VISIBLE_DEVICES``), and merge their numbers.
``--out`` receives the folder of each job, ``numbers.json``, ``asynchrony.json`` (a file of benchmarks/results) and
``asynchrony.png``.  Flags after ``--`` are train.py's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import subprocess
import sys
import threading
import time
from argparse import Namespace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import results_page  # noqa: E402
from benchmarks.published_configs import PUBLISHED  # noqa: E402

FULLY = (
    "train_async.py --rollout-num-gpus 1 --rollout-function-path "
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async --max-staleness"
)
MODES = {
    "colocated": "train.py --colocate --actor-num-gpus-per-node 2",
    "synchronous": "train.py --rollout-num-gpus 1",
    "partial": "train.py --rollout-num-gpus 1 --partial-rollout --over-sampling-batch-size {twice}",
    "ahead": "train_async.py --rollout-num-gpus 1",
    "staleness 1": f"{FULLY} 1",
    "staleness 2": f"{FULLY} 2",
    "staleness 4": f"{FULLY} 4",
}
"""Script and flags of each mode; the first shares both GPUs, the others have one for the trainer and one for an
engine."""
FLAGS = """
--actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus-per-engine 1 --input-key prompt --label-key label
--apply-chat-template --rm-type random --n-samples-per-prompt 8 --rollout-temperature 1 --use-dynamic-batch-size
--balance-data --advantage-estimator grpo --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.98
--attention-dropout 0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32 --save-interval 1000 --no-save-optim
--sglang-server-concurrency 256 --custom-generate-function-path benchmarks.asynchrony.generate
"""
SAMPLE_S = 0.1
"""Seconds between two readings of the GPUs."""
LAST_S = 20.0
"""Seconds for a job to end after its last step, while the next begins."""


# Inside the jobs


def response_length(index: int, trace: dict[str, float]) -> int:
    """Return the number of tokens in the response of sample ``index``."""
    drawn = trace["median"] * random.Random(1_000_003 * index + 17).lognormvariate(0.0, trace["sigma"])
    return max(4, min(int(trace["cap"]), int(drawn)))


async def generate(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Answer a sample as a job does, with the trace's length; the first sample waits for its job's turn."""
    from slime.rollout import sglang_rollout

    folder = Path(args.save)
    (folder / "ready").touch()
    while not (folder / "go").exists():
        await asyncio.sleep(0.05)
    length = response_length(sample.index, json.loads((folder / "trace.json").read_text()))
    return await sglang_rollout.generate(
        args, sample, sampling_params | {"max_new_tokens": length, "ignore_eos": True}
    )


# The jobs


def write_model(folder: Path, model: str, *, has_weights: bool = True) -> None:
    """Write the tiny task's prompts and tokenizer to ``folder``, with a random model of the shape of ``model``.

    Without weights, only ``config.json`` describes that model.
    """
    import torch
    import transformers

    from examples.tiny_arithmetic.make_task import make_task

    make_task(folder, seed=1)
    if model == "tiny":
        return
    shape = {**PUBLISHED[model], "max_position_embeddings": 40960, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(**shape)
    torch.manual_seed(1)
    with torch.device("meta" if not has_weights else "cuda" if torch.cuda.is_available() else "cpu"):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if not has_weights:
        made.config.architectures = [type(made).__name__]
        made.config.save_pretrained(folder / "hf")
        return
    made.save_pretrained(folder / "hf")
    del made
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the jobs use the GPU from now on


def command(mode: str, options: argparse.Namespace, extra: list[str]) -> list[str]:
    """Return the command that starts the job of a mode."""
    task, save = options.out / "task", folder_of(mode, options)
    script, *words = MODES[mode].format(twice=2 * options.prompts).split()
    words = [
        *("--hf-checkpoint", task / "hf", "--ref-load", task / "hf", "--load", save, "--save", save),
        *("--prompt-data", task / "data/grpo.jsonl", "--num-rollout", options.rollouts, *FLAGS.split()),
        *("--rollout-batch-size", options.prompts, "--global-batch-size", options.prompts * 8),
        *("--rollout-max-response-len", options.cap, "--max-tokens-per-gpu", options.tokens, *words, *extra),
    ]
    return [sys.executable, str(ROOT / script), *map(str, words)]


def folder_of(mode: str, options: argparse.Namespace) -> Path:
    """Return the folder of a mode's job."""
    return Path(options.out) / mode.replace(" ", "_")


def start(mode: str, options: argparse.Namespace, extra: list[str]) -> subprocess.Popen[bytes]:
    """Start the job of a mode, which waits for :func:`measure`."""
    folder = folder_of(mode, options)
    folder.mkdir(parents=True, exist_ok=True)
    trace = {"median": options.median, "sigma": options.sigma, "cap": options.cap}
    (folder / "trace.json").write_text(json.dumps(trace))
    environment = {**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command(mode, options, extra), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
        )


class Sampler(threading.Thread):
    """Measures the share of time in which each GPU runs a kernel, by NVML; nothing without NVML."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, list[int]]] = []

    def run(self) -> None:
        """Sample the GPUs until the program ends."""
        try:
            import pynvml

            pynvml.nvmlInit()
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")  # NVML ignores it
            indices = map(int, shown.split(",")) if shown else range(pynvml.nvmlDeviceGetCount())
            gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
        except Exception as error:  # no library, no driver
            print(f"no NVML: {error!r}", flush=True)
            return
        while True:
            self.samples.append((time.time(), [pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in gpus]))
            time.sleep(SAMPLE_S)


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the metric records that a job has written so far."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_starts(jobs: dict[str, subprocess.Popen[bytes]], options: argparse.Namespace) -> None:
    """Wait until every job has its first request, or has ended."""
    start_s = time.monotonic()
    for mode, job in jobs.items():
        ready = folder_of(mode, options) / "ready"
        while job.poll() is None and not ready.exists() and time.monotonic() - start_s < options.start_s:
            time.sleep(0.2)
        print(f"{mode}: {'started' if ready.exists() else 'not up'}, {time.monotonic() - start_s:.0f} s", flush=True)


def leave(job: subprocess.Popen[bytes]) -> None:
    """Let a job end that has finished its steps."""
    try:
        job.wait(timeout=LAST_S)
    except subprocess.TimeoutExpired:
        job.terminate()


def measure(
    mode: str,
    job: subprocess.Popen[bytes],
    before: subprocess.Popen[bytes] | None,
    options: argparse.Namespace,
    sampler: Sampler,
    limit_s: float,
) -> dict[str, Any]:
    """Let a job run its steps, within ``limit_s``; return its numbers.

    The previous job, ``before``, ends while this one's first, unmeasured requests run.
    """
    folder = folder_of(mode, options)
    (folder / "go").touch()
    deadline_s = time.monotonic() + limit_s
    if before is not None:
        leave(before)
    ends: dict[int, float] = {}
    while len(ends) < options.rollouts and job.poll() is None and time.monotonic() < deadline_s:
        ends = {row["rollout/step"]: row["time"] for row in records(folder) if "perf/time_step_s" in row}
        time.sleep(0.2)
    if len(ends) < options.rollouts:
        job.terminate()
    first, last = 1, max(ends, default=0) - 1
    if last <= first:
        said = (folder / "log").read_text(errors="replace")[-1500:].strip()
        return {"mode": mode, "error": f"{said}\n{len(ends)} of {options.rollouts} rollouts in {limit_s:.0f} s"}
    begin, end = ends[first], ends[last]
    counted = [row for row in records(folder) if first < row.get("rollout/step", -1) <= last]
    lengths = [row["rollout/response_lengths"] for row in counted if "rollout/response_lengths" in row]
    tokens = sum(lengths) * options.prompts * 8
    inside = [(moment - begin, use) for moment, use in sampler.samples if begin <= moment <= end]
    waits = [row["perf/wait_time_ratio"] for row in counted if "perf/wait_time_ratio" in row]
    return {
        "mode": mode,
        "rollouts": last - first,
        "seconds": end - begin,
        "tokens": tokens,
        "tokens_per_s": tokens / (end - begin),
        "idle": [1 - sum(gpu) / 100 / len(gpu) for gpu in zip(*(use for _, use in inside), strict=True)],
        "trainer_waits": sum(waits) / len(waits) if waits else None,
        "use": inside,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table; factors are relative to the synchronous job."""
    lines = [
        "| mode | rollouts | seconds | tokens/s | times synchronous | idle share of each GPU | trainer waits |",
        "|---|--:|--:|--:|--:|---|--:|",
    ]
    base = next((row["tokens_per_s"] for row in rows if row["mode"] == "synchronous" and "tokens" in row), None)
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['mode']} | failed: {row['error'].splitlines()[-1]} | | | | | |")
            continue
        factor = f"{row['tokens_per_s'] / base:.2f}" if base else ""
        idle = ", ".join(f"{share:.0%}" for share in row["idle"])
        waits = "" if row["trainer_waits"] is None else f"{row['trainer_waits']:.0%}"
        lines.append(
            f"| {row['mode']} | {row['rollouts']} | {row['seconds']:.1f} | {row['tokens_per_s']:,.0f} | {factor} | "
            f"{idle} | {waits} |"
        )
    return "\n".join(lines)


def result(options: argparse.Namespace, rows: list[dict[str, Any]], command: str, together: str) -> dict[str, Any]:
    """Return the rows as a file of benchmarks/results; ``together`` says what the jobs shared."""
    return {
        **{"title": "What asynchrony gives", "group": "Whole jobs", "date": datetime.now(UTC).date().isoformat()},
        **{"hardware": results_page.find_hardware(), "versions": results_page.versions()},
        **{"command": command, "commit": results_page.commit()},
        "notes": [
            f"{options.model} with random weights; {options.prompts} prompts x 8 samples; response lengths of one "
            f"seeded trace (log-normal, median {options.median:g}, sigma {options.sigma:g}, cap {options.cap:,}), "
            f"forced; micro-batches of {options.tokens:,} tokens; {options.rollouts} rollouts a mode, of which all "
            "but the first two and the last are measured. One GPU trains and one generates; a GPU is idle while no "
            f"kernel runs on it. {together}"
        ],
        "tables": results_page.parse(table(rows))[1],
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw what each GPU did in each mode, on one time axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row.get("use")]
    figure, axes = plt.subplots(len(shown), 1, figsize=(9, 1.3 * len(shown) + 0.6), sharex=True, squeeze=False)
    for axis, row in zip(axes[:, 0], shown, strict=True):
        moments = [moment for moment, _ in row["use"]]
        for gpu, uses in enumerate(zip(*(use for _, use in row["use"]), strict=True)):
            axis.fill_between(moments, [gpu + 0.85 * use / 100 for use in uses], gpu, linewidth=0, color=f"C{gpu}")
        axis.set(yticks=[0.4, 1.4], yticklabels=["GPU 0", "GPU 1"], ylim=(0, 2))
        axis.set_title(f"{row['mode']}: {row['tokens_per_s']:,.0f} tokens/s", loc="left", fontsize=9)
    axes[-1, 0].set_xlabel("seconds; height: share of time with a running kernel")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write(options: argparse.Namespace, extra: list[str], rows: list[dict[str, Any]]) -> None:
    """Write the numbers of the modes that have run."""
    command = shlex.join(["python", *sys.argv])
    shown = {name: value for name, value in vars(options).items() if name not in ("out", "merge")}
    numbers = {"command": command, "options": shown, "flags": extra, "rows": rows}
    (options.out / "numbers.json").write_text(json.dumps(numbers))
    results_page.save("asynchrony", result(options, rows, command, "All jobs were up, one ran."), options.out)


def merge(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Merge the results of several runs of this program; the options are those of the first."""
    options.out.mkdir(parents=True, exist_ok=True)
    runs = [json.loads(path.read_text()) for path in options.merge]
    rows = [row for run in runs for row in run["rows"]]
    command = "\n".join(run["command"] for run in runs)
    said = result(Namespace(**runs[0]["options"]), rows, command, "Each job was up by itself.")
    results_page.save("asynchrony", said, options.out)
    return rows


def run(options: argparse.Namespace, extra: list[str]) -> list[dict[str, Any]]:
    """Run the modes; return a row of numbers for each."""
    began_s = time.monotonic()
    write_model(options.out / "task", options.model)
    sampler = Sampler()
    sampler.start()
    jobs = {mode: start(mode, options, extra) for mode in options.modes}
    rows: list[dict[str, Any]] = []
    try:
        wait_for_starts(jobs, options)
        before = None
        for mode, job in jobs.items():
            limit_s = min(options.limit_s, options.total_s - (time.monotonic() - began_s))
            rows.append(measure(mode, job, before, options, sampler, limit_s))
            before = job
            write(options, extra, rows)
            print(table(rows[-1:]), flush=True)
    finally:
        leave_all(jobs)
    return rows


def leave_all(jobs: dict[str, subprocess.Popen[bytes]]) -> None:
    """End the jobs and free their GPUs."""
    for job in jobs.values():
        job.terminate()
    for mode, job in jobs.items():
        try:
            job.wait(timeout=3 * LAST_S)
        except subprocess.TimeoutExpired:
            print(f"{mode}: does not end", flush=True)
            job.kill()


def main() -> None:
    """Run the modes, and print and write their numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    parser.add_argument("--model", default="qwen3-0.6B", choices=["tiny", *sorted(PUBLISHED)], metavar="NAME")
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=[*MODES], metavar="MODE")
    parser.add_argument("--rollouts", type=int, default=8, help="of each job; three of them are not measured")
    parser.add_argument("--prompts", type=int, default=32, help="of a rollout, 8 samples each")
    parser.add_argument("--median", type=float, default=800, help="of the response lengths, tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm")
    parser.add_argument("--cap", type=int, default=16384, help="longest response")
    parser.add_argument("--tokens", type=int, default=16384, help="--max-tokens-per-gpu")
    parser.add_argument("--start-s", type=float, default=600, help="for all jobs to start")
    parser.add_argument("--limit-s", type=float, default=1800, help="for one job, once it is its turn")
    parser.add_argument("--total-s", type=float, default=7200, help="for everything; jobs whose turn is later fail")
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="run nothing: numbers.json of earlier runs"
    )
    own, extra = sys.argv[1:], []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    options.out = options.out.resolve()
    rows = merge(options) if options.merge else run(options, extra)
    print(table(rows), flush=True)
    if any(row.get("use") for row in rows):
        draw(rows, options.out / "asynchrony.png")


if __name__ == "__main__":
    main()
