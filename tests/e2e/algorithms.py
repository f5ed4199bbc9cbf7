"""Runs the tiny task's real job for each algorithm and seed from one warm start, and compares accuracies.

    python -m tests.e2e.algorithms                                    CPU, all algorithms, one job after the other
    python -m tests.e2e.algorithms --only grpo ppo --rollouts 10      some of them
    python -m tests.e2e.algorithms --device gpu --parallel 4          one job per GPU

Each job is ``scripts/run-tiny-cpu.sh`` or ``run-tiny-gpu.sh`` in a private Ray; arguments after ``--`` go to
every job.  A missing ``--warm-start`` folder is created as in the demo.  Exit code 0 if every job
has reached ``--target``.

Settings that a row does not set come from the script: 32 prompts x 8 samples per rollout, one optimizer step, learning
rate 5e-4, no KL and no entropy term, temperature 1, responses of about 18 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import torch

from benchmarks import results_page
from examples.tiny_arithmetic.summary import GREEDY, SAMPLED, Curve, curve, eval_curve
from slime.observability.metrics_file import FILE_NAME, read_records
from tests.seeds import jobs
from tests.seeds.jobs import REPO, CommandFailed

JOB_S = 3600


class Loop(StrEnum):
    """The training loop and rollout function of a job: ``LOOP`` of the recipes."""

    SYNC = "sync"
    """``train.py``: engine and trainer take turns on one GPU."""
    AHEAD = "ahead"
    """``train_async.py``: rollout k + 1 is generated while rollout k is trained; one GPU each."""
    FULLY = "async"
    """``train_async.py`` with the fully asynchronous rollout: generation never stops; one GPU each."""

    @property
    def num_gpus(self) -> int:
        return 1 if self is Loop.SYNC else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One row of the table."""

    name: str
    """Name of the run's folder, and for ``--only``."""
    title: str
    flags: tuple[str, ...]
    """Flags added to the recipe's; the last of duplicate flags wins.  ``{run}`` is the run's folder."""
    why: str
    """The reason for these hyperparameters."""
    loop: Loop = Loop.SYNC
    all_seeds: bool = False
    """True to run with every seed of ``--seeds``, not only the first."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the flags name: name in the run's folder -> text."""


def _flags(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TWO_STEPS = "--global-batch-size 128"
"""Two optimizer steps per rollout, so that in the second, ratios are not 1 and clipping has an effect."""

VARIANTS: tuple[Variant, ...] = (
    Variant(
        name="grpo",
        title="GRPO",
        flags=_flags("--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28"),
        why="the demo's own numbers; one step a rollout, so on policy",
        all_seeds=True,
    ),
    Variant(
        name="gspo",
        title="GSPO",
        flags=_flags(f"--advantage-estimator gspo --eps-clip 0.01 --eps-clip-high 0.015 {TWO_STEPS}"),
        why=(
            "the ratio is a mean over the sequence, so it moves far less than a token's: the bounds must be small; "
            "the paper's 3e-4 are for learning rates of 1e-6, here a step moves a sequence by about 0.01"
        ),
    ),
    Variant(
        name="cispo",
        title="CISPO",
        flags=_flags(f"--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4.0 {TWO_STEPS}"),
        why="no lower bound and a wide upper one, as in the paper: the clip only cuts weights, it stops no token",
    ),
    Variant(
        name="reinforce_plus_plus",
        title="REINFORCE++",
        flags=_flags("--advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.001"),
        why=(
            "no groups: whitening over the batch is the only baseline, so it must be on; the KL penalty is part of "
            "the return and is kept small, for the warm start is a bad model to stay close to"
        ),
    ),
    Variant(
        name="reinforce_plus_plus_baseline",
        title="REINFORCE++ with baseline",
        flags=_flags("--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages --kl-coef 0.001"),
        why="the group's mean is the baseline, whitening sets the scale; KL as above",
    ),
    Variant(
        name="ppo",
        title="PPO",
        flags=_flags(
            "--advantage-estimator ppo --normalize-advantages --gamma 1.0 --lambd 1.0 --value-clip 0.2 "
            f"--num-critic-only-steps 1 --megatron-config-path {{run}}/roles.yaml {TWO_STEPS}"
        ),
        why=(
            "the reward comes at the end of a short response, so neither discount nor lambda below 1; two steps a "
            "rollout; the critic begins with a random head: it learns alone for a rollout, and twice as fast "
            "(`roles.yaml` sets its learning rate to 1e-3)"
        ),
        all_seeds=True,
        files={"roles.yaml": "megatron:\n  - {name: value, role: critic, overrides: {lr: 0.001}}\n"},
    ),
    Variant(
        name="dr_grpo",
        title="Dr. GRPO",
        flags=_flags(
            "--advantage-estimator grpo --disable-grpo-std-normalization "
            "--custom-pg-loss-reducer-function-path examples.DrGRPO.custom_reducer.get_pg_loss_reducer"
        ),
        why="no division by the group's deviation, and every response divided by the same constant",
    ),
    Variant(
        name="rloo",
        title="RLOO, a plug-in",
        flags=_flags("--advantage-estimator examples.custom_estimator.rloo.rloo"),
        why="the estimator that the page on customization adds; nothing else differs from GRPO",
    ),
    Variant(
        name="grpo_one_step_tis",
        title="GRPO with TIS, one rollout ahead",
        flags=_flags("--advantage-estimator grpo --use-tis --tis-clip 2.0"),
        why="the engine is one update behind; the weights pi_trainer / pi_engine make up for it, cut at 2",
        loop=Loop.AHEAD,
    ),
    Variant(
        name="grpo_fully_async_tis",
        title="GRPO with TIS, fully asynchronous",
        flags=_flags("--advantage-estimator grpo --use-tis --tis-clip 2.0 --max-staleness 2"),
        why="as above; groups may be two updates old, and weights change in the middle of responses",
        loop=Loop.FULLY,
    ),
)


@dataclass(frozen=True)
class Result:
    """The results of a job."""

    variant: Variant
    seed: int
    failure: str
    sampled: Curve
    """(rollouts trained, held-out accuracy at temperature 1)."""
    greedy: Curve
    differences: Curve
    """(optimizer step, mean abs(trainer log-prob - engine log-prob))."""

    def rollouts_to(self, target: float) -> int | None:
        """Return the rollouts trained at the first evaluation that reaches ``target``."""
        return next((int(step) for step, value in self.sampled if value >= target), None)


def make_warm_start(folder: Path) -> None:
    """Create task, model, conversion and supervised fine-tuning with the demo's script."""
    if not (folder / "sft" / "latest_checkpointed_iteration.txt").exists():
        environment = dict(os.environ) | {"TINY_DIR": str(folder), "UNTIL": "warm_start", "DEVICE": "cpu"}
        subprocess.run([str(REPO / "scripts" / "demo.sh")], env=environment, cwd=REPO, check=True)


def run_job(variant: Variant, seed: int, number: int, options: argparse.Namespace) -> Result:
    """Run one job in a new folder, and read its results."""
    folder = options.out / f"{variant.name}-seed{seed}"
    folder.mkdir(parents=True)
    for name, text in variant.files.items():
        (folder / name).write_text(text)
    config = json.loads((options.warm_start / "task/hf/config.json").read_text())
    flags = ["--num-rollout", str(options.rollouts), "--eval-interval", "5", "--save-interval", "20"]
    flags += ["--kv-channels", str(config["head_dim"])]  # the warm start's may differ from the script's
    flags += [flag.replace("{run}", str(folder)) for flag in variant.flags] + options.flags
    variables = {
        "TINY_DIR": str(options.warm_start), "SAVE_DIR": str(folder), "SEED": str(seed), "LOOP": variant.loop.value,
    }  # fmt: skip
    if options.device == "gpu":
        count, needs = torch.cuda.device_count(), variant.loop.num_gpus
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str((number + k) % count) for k in range(needs))
    failure = ""
    try:
        words = [str(REPO / "scripts" / f"run-tiny-{options.device}.sh"), *flags]
        jobs.run(words, folder / "log.txt", limit_s=JOB_S, variables=variables)
    except CommandFailed as error:
        failure = str(error)
    records = list(read_records(folder / FILE_NAME)) if (folder / FILE_NAME).exists() else []
    differences = curve(records, "train/train_rollout_logprob_abs_diff", "train/step")
    result = Result(variant, seed, failure, eval_curve(records, SAMPLED), eval_curve(records, GREEDY), differences)
    print(f"{folder.name}: {failure or result.sampled[-1:]}", flush=True)
    return result


def table(results: Sequence[Result], target: float) -> str:
    """Return a row for each algorithm: means over its seeds."""
    columns = ("algorithm", "seeds", "accuracy before and after", "greedy", f"rollouts to {target}", "abs(dlogp)")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for _, group in itertools.groupby(results, lambda result: result.variant.name):
        runs = list(group)
        cells = [runs[0].variant.title, ", ".join(str(run.seed) for run in runs)]
        for curves in ([run.sampled for run in runs], [run.greedy for run in runs]):
            ends = [(points[0][1], points[-1][1]) for points in curves if points]
            cells.append(", ".join(f"{statistics.fmean(values):.3f}" for values in zip(*ends, strict=True)))
        cells.append(", ".join(str(run.rollouts_to(target) or "never") for run in runs))
        cells.append(f"{max((value for run in runs for _, value in run.differences), default=float('nan')):.1g}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="All for grpo and ppo, else the first."
    )
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--target", type=float, default=0.95, help="Held-out accuracy at temperature 1.")
    parser.add_argument("--warm-start", type=Path, default=Path("runs/tiny"), help="A folder with task/ and sft/.")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"), help="A folder that is not there yet.")
    parser.add_argument("--parallel", type=int, default=1, help="Jobs side by side.")
    parser.add_argument("--write-docs", action="store_true", help="Record the table in benchmarks/results.")
    parser.add_argument("flags", nargs="*", help="More flags for every job, after --.")
    options = parser.parse_args()
    options.out, options.warm_start = options.out.resolve(), options.warm_start.resolve()
    make_warm_start(options.warm_start)
    chosen = [variant for variant in VARIANTS if variant.name in options.only]
    wanted = [(one, seed) for one in chosen for seed in (options.seeds if one.all_seeds else options.seeds[:1])]
    with ThreadPoolExecutor(options.parallel) as pool:
        futures = [pool.submit(run_job, *job, number, options) for number, job in enumerate(wanted)]
    results = [future.result() for future in futures]
    text = table(results, options.target)
    print(f"\n{text}\n")
    if options.write_docs:
        results_page.record("algorithms_end_to_end", text)
    missed = [run for run in results if run.failure or run.rollouts_to(options.target) is None]
    print(f"{len(results) - len(missed)} of {len(results)} jobs reached {options.target:.2f}; see {options.out}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
