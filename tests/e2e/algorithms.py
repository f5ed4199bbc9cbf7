"""The tiny task's real job, once for each algorithm and seed, from one warm start: a table, curves, numbers.

    python -m tests.e2e.algorithms                                    CPU, all algorithms, one job after the other
    python -m tests.e2e.algorithms --only grpo,ppo --rollouts 10      some of them
    python -m tests.e2e.algorithms --device gpu --gpus 0,1,2,3 --parallel 8 -- --sglang-sampling-backend pytorch
    python -m tests.e2e.algorithms --from runs/algorithms/results.json --write-docs    the table of an earlier call

Each job is ``scripts/run-tiny-cpu.sh`` or ``run-tiny-gpu.sh`` (``train.py`` or ``train_async.py``, Megatron, SGLang,
Ray) with the flags of ``tests/e2e/algorithm_variants.py``, in a private Ray cluster; what stands behind ``--`` goes to
every job.  ``--warm-start`` is a folder with ``task/`` and ``sft/``; one that is not there is made, on a CPU, as the
demo makes it.  With ``--device gpu`` each job sees its own GPU (the asynchronous ones two); more jobs than GPUs share.

A run that is done is not done again, one that was stopped goes on at its last checkpoint.  In ``--out``:
``results.json``, ``table.md``, ``curves.png``, and for each run its ``metrics.jsonl`` and the end of its log.

Exit code 0 when every run has done all of its rollouts and reached ``--target``, else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import results_page
from tests.e2e import algorithm_results
from tests.e2e.algorithm_jobs import REPO, Recipe, Run
from tests.e2e.algorithm_results import RunResult
from tests.e2e.algorithm_variants import VARIANTS, Variant, select

PICTURE = "algorithm_curves.png"
POLL_S = 1.0


def say(start: float, text: str) -> None:
    """A progress line."""
    print(f"[{time.monotonic() - start:5.0f} s] {text}", flush=True)


def make_warm_start(folder: Path) -> None:
    """Task, model, conversion and supervised fine-tuning, by the demo's own script."""
    if (folder / "sft" / "latest_checkpointed_iteration.txt").exists() and (folder / "task" / "task.json").exists():
        return
    print(f"warm start: {folder} has none, making it", flush=True)
    environment = dict(os.environ) | {"TINY_DIR": str(folder), "UNTIL": "warm_start", "DEVICE": "cpu"}
    subprocess.run([str(REPO / "scripts" / "demo.sh")], env=environment, cwd=REPO, check=True)


def digest(folder: Path) -> str:
    """Of the weights that every run starts from."""
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((folder / "sft").glob("iter_*/*.distcp"))]
    if not sums:
        raise ValueError(f"{folder / 'sft'} holds no checkpoint (iter_*/*.distcp), so it is no warm start")
    return hashlib.sha256("".join(sums).encode()).hexdigest()[:16]


def write_eval_config(warm_start: Path, path: Path) -> None:
    """The task's own, with the data where it lies now: the folder may have been made elsewhere."""
    data = warm_start / "task" / "data" / "eval.jsonl"
    lines = (warm_start / "task" / "eval.yaml").read_text().splitlines()
    moved = [f"{line.partition('path:')[0]}path: {data}" if "path:" in line else line for line in lines]
    path.write_text("\n".join(moved) + "\n")


def choose_gpus(run: Run, running: list[Run], gpus: list[str]) -> list[str]:
    """The GPUs that the fewest running jobs use; none on a CPU."""
    load = Counter(gpu for other in running for gpu in other.gpus)
    return sorted(sorted(gpus, key=lambda gpu: (load[gpu], gpus.index(gpu)))[: run.variant.loop.num_gpus])


def may_run_beside(run: Run, running: list[Run], gpus: list[str], parallel: int) -> bool:
    """Whether there is room: fewer than ``parallel`` jobs, and with a job for each GPU only free GPUs."""
    if len(running) >= parallel:
        return False
    if not running or parallel > len(gpus) or not gpus:
        return True
    return len(gpus) - len({gpu for other in running for gpu in other.gpus}) >= run.variant.loop.num_gpus


def follow(run: Run, seen: dict[str, int], start: float) -> None:
    """Say what a run has newly evaluated."""
    points = run.result().sampled
    if len(points) > seen.get(run.name, 0):
        seen[run.name] = len(points)
        say(start, f"{run.name}: {points[-1][0]:.0f} rollouts, held-out {points[-1][1]:.3f}")


def run_all(runs: list[Run], gpus: list[str], options: argparse.Namespace) -> None:
    """Start, follow and end the jobs, as many at a time as there is room for."""
    start = time.monotonic()
    # Jobs on two GPUs first: later they would wait until two are free.
    waiting = sorted((run for run in runs if run.may_start), key=lambda run: -run.variant.loop.num_gpus)
    running: list[Run] = []
    seen: dict[str, int] = {}
    last_start = -options.stagger_s
    for run in runs:
        if run.is_done:
            say(start, f"{run.name}: done earlier")
    try:
        while waiting or running:
            if time.monotonic() - start > options.stop_after_s:
                say(start, "time is up (--stop-after-s)")
                return
            fits = next((run for run in waiting if may_run_beside(run, running, gpus, options.parallel)), None)
            if fits is not None and time.monotonic() - start - last_start >= options.stagger_s:
                last_start = time.monotonic() - start
                fits.start(choose_gpus(fits, running, gpus))
                waiting.remove(fits)
                running.append(fits)
                say(start, f"{fits.name}: started" + (f" on GPU {','.join(fits.gpus)}" if fits.gpus else ""))
            for run in list(running):
                has_ended = run.poll()
                follow(run, seen, start)
                if has_ended:
                    running.remove(run)
                    again = run.may_start
                    waiting += [run] if again else []
                    how = f"FAILED, {run.failure}; see {run.folder / 'log.txt'}" if run.failure else "done"
                    say(start, f"{run.name}: {how}{'; starting it again' if again else ''}")
            time.sleep(POLL_S)
    finally:
        for run in running:
            run.terminate()
        for run in running:
            run.stop("stopped with the command")


def report(about: dict[str, Any], runs: list[RunResult], out: Path, *, write_docs: bool) -> int:
    """Print the table, write the files; gives the exit code."""
    text = algorithm_results.table(about, runs)
    print(f"\n{text}\n")
    algorithm_results.save(out / "results.json", about, runs)
    (out / "table.md").write_text(text + "\n")
    if find_spec("matplotlib") is None:
        print("curves.png is not drawn: there is no matplotlib here; elsewhere, --from results.json draws it")
    else:
        algorithm_results.draw(out / "curves.png", about, runs)
    if write_docs:
        shutil.copyfile(out / "curves.png", REPO / "docs" / PICTURE)
        results_page.record("algorithms_end_to_end", text, hardware=about["machine"])
    problems = algorithm_results.misses(runs, about["target"])
    for problem in problems:
        print(f"MISSED {problem}", flush=True)
    print(f"{len(runs) - len(problems)} of {len(runs)} runs reached {about['target']:.2f}; see {out}", flush=True)
    return 1 if problems else 0


def machine(gpus: list[str], parallel: int) -> str:
    """What the table says it ran on."""
    beside = f", {parallel} jobs side by side" if parallel > 1 else ""
    if not gpus:
        return f"{os.cpu_count()} CPU cores ({platform.machine()}) in fp32{beside}"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", f"--id={','.join(gpus)}"]
    names = Counter(subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split("\n"))
    return " and ".join(f"{count} {name.strip()}" for name, count in names.items()) + f" in bf16{beside}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(variant.name for variant in VARIANTS)
    parser.add_argument("--only", help=f"some of {names}, with commas between")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--seeds", default="1,2,3", help="all of them for grpo and ppo, the first for the others")
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--target", type=float, default=0.95, help="held-out accuracy at temperature 1")
    parser.add_argument("--warm-start", type=Path, default=Path("runs/tiny"), help="folder with task/ and sft/")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--gpus", default="0", help="with --device gpu: their numbers, with commas between")
    parser.add_argument("--parallel", type=int, help="jobs side by side; default: one, or one for each GPU")
    parser.add_argument("--stagger-s", type=float, default=2, help="seconds between two starts")
    parser.add_argument("--job-timeout-s", type=float, help="of one job; default 480 on a GPU, 3600 on a CPU")
    parser.add_argument("--stop-after-s", type=float, default=float("inf"), help="then stop and report what there is")
    parser.add_argument("--starts", type=int, default=1, help="how often a job that fails is started in all")
    parser.add_argument("--keep-checkpoints", action="store_true", help="also of runs that are done")
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help=f"write benchmarks/results/algorithms_end_to_end.json and docs/{PICTURE}",
    )
    parser.add_argument("--from", dest="source", type=Path, help="a results.json: report it, run nothing")
    parser.add_argument("flags", nargs="*", help="more flags for every job, after --")
    options = parser.parse_args(arguments)
    options.job_timeout_s = options.job_timeout_s or (480 if options.device == "gpu" else 3600)
    return options


def plan(options: argparse.Namespace) -> list[Run]:
    """The runs that the options name.

    Raises:
        ValueError: they cannot run here, or their folders hold something else.
    """
    variants = select(options.only)
    too_large = [variant.name for variant in variants if variant.loop.num_gpus > len(options.gpus.split(","))]
    if options.device == "gpu" and too_large:
        raise ValueError(
            f"--gpus is {options.gpus}, and {', '.join(too_large)} take two; give more, or choose with --only"
        )
    out, warm_start = options.out.resolve(), options.warm_start.resolve()
    out.mkdir(parents=True, exist_ok=True)
    make_warm_start(warm_start)
    write_eval_config(warm_start, out / "eval.yaml")
    recipe = Recipe(
        device=options.device,
        out=out,
        warm_start=warm_start,
        warm_start_digest=digest(warm_start),
        eval_config=out / "eval.yaml",
        rollouts=options.rollouts,
        extra_flags=tuple(options.flags),
        timeout_s=options.job_timeout_s,
        max_starts=options.starts,
        keeps_checkpoints=options.keep_checkpoints,
    )
    seeds = [int(seed) for seed in options.seeds.split(",")]

    def seeds_of(variant: Variant) -> list[int]:
        return seeds if variant.all_seeds else seeds[:1]

    return [Run(recipe, variant, seed) for variant in variants for seed in seeds_of(variant)]


def main() -> None:
    """Run and report."""
    options = parse()
    if options.source is not None:
        about, results = algorithm_results.load(options.source)
        sys.exit(report(about, results, options.source.resolve().parent, write_docs=options.write_docs))
    # timeout(1) and schedulers end us with SIGTERM: the jobs must go with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    gpus = options.gpus.split(",") if options.device == "gpu" else []
    options.parallel = options.parallel or max(1, len(gpus))
    try:
        runs = plan(options)
    except ValueError as error:
        sys.exit(f"tests.e2e.algorithms: {error}")
    about = {
        "rollouts": options.rollouts,
        "target": options.target,
        "device": options.device,
        "machine": machine(gpus, options.parallel),
        "extra_flags": options.flags,
        "warm_start": runs[0].recipe.warm_start_digest,
    }
    run_all(runs, gpus, options)
    sys.exit(report(about, [run.result() for run in runs], options.out, write_docs=options.write_docs))


if __name__ == "__main__":
    main()
