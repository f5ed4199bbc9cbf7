"""Five tiny jobs whose numbers must not change, bit for bit, when the code's structure changes.

Requests go to the engine one at a time, every process has one thread, and the reward depends only on the tokens: on
one machine with one set of packages, two runs of a job compute the same.
"""

from __future__ import annotations

import hashlib
import shlex
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.utils.types import Sample
from tests.e2e.job import JOB_S, PYTHONPATH, Job, records

NUM_STEPS = 5
NUMBERS = (
    *("train/loss", "train/grad_norm", "train/pg_loss", "train/kl_loss", "train/train_rollout_logprob_abs_diff"),
    *("train/critic-value_loss", "train/critic-grad_norm"),
)
"""Metrics of a step that are compared, if a job has them."""
COLUMNS = ("tokens", "rollout_log_probs", "log_probs", "ref_log_probs", "values", "advantages", "returns")
"""Columns of the train dump that are compared, if a job has them."""
COMMON = """
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --hf-checkpoint {task}/hf --ref-load {base}/torch_dist
    --load {save} --save {save} --save-interval 1000 --seed 3 --use-dynamic-batch-size --max-tokens-per-gpu 512
    --optimizer adam --lr 1e-3 --lr-decay-style constant --weight-decay 0.1
    --save-debug-train-data {save}/dump/{{rollout_id}}.pt
"""
ROLLOUT = """
    --prompt-data {task}/data/grpo.jsonl --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --custom-rm-path tests.golden.jobs.reward --num-rollout 5 --rollout-batch-size 2 --n-samples-per-prompt 4
    --rollout-max-response-len 12 --global-batch-size 8 --eps-clip 0.2 --eps-clip-high 0.28 --rollout-num-gpus 1
    --rollout-num-gpus-per-engine 1 --sglang-server-concurrency 1 --sglang-max-running-requests 1
    --sglang-disable-radix-cache
"""
GRPO = "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl"


@dataclass(frozen=True)
class GoldenJob:
    """A driver with its flags; ``{task}``, ``{base}`` and ``{save}`` are folders."""

    script: str
    flags: str


JOBS = {
    "grpo": GoldenJob("train.py", f"{COMMON} {ROLLOUT} {GRPO} --colocate"),
    "async": GoldenJob("train_async.py", f"{COMMON} {ROLLOUT} {GRPO} --use-tis"),
    "ppo": GoldenJob(
        "train.py",
        f"{COMMON} {ROLLOUT} --colocate --advantage-estimator ppo --normalize-advantages --gamma 0.99 --lambd 0.95 "
        "--kl-coef 0.01 --num-critic-only-steps 1",
    ),
    "sft": GoldenJob(
        "train_async.py",
        f"{COMMON} --prompt-data {{task}}/data/sft.jsonl --input-key messages --num-rollout 5 --rollout-batch-size 8 "
        "--global-batch-size 8 --rollout-function-path slime.rollout.sft_rollout.generate_rollout --debug-train-only "
        "--loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns",
    ),
    "lora": GoldenJob("train.py", f"{COMMON} {ROLLOUT} {GRPO} --colocate --lora-rank 4"),
}
"""One rollout ahead represents asynchronous training; with fully asynchronous answers, the weights are up to
chance."""


async def reward(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """Return a number that depends only on the tokens, and differs within a group."""
    if isinstance(sample, list):
        return [_drawn(one) for one in sample]
    return _drawn(sample)


def _drawn(sample: Sample) -> float:
    return sum(sample.tokens) % 5 / 4


def run(name: str, base: Path, *more: str, **environment: str) -> dict[str, Any]:
    """Run a job and return its numbers: the metrics of each step, and a digest of every column of each rollout.

    Raises:
        RuntimeError: the job failed; the message names its log.
    """
    save = base / name
    flags = shlex.split(JOBS[name].flags.format(task=base / "task", base=base, save=save))
    log = base / f"{name}.log"
    code = Job(JOBS[name].script, [*flags, *more], log, **_environment() | environment).finish(JOB_S)
    if code != 0:
        raise RuntimeError(f"the job {name} ended with {code}; see {log}")
    steps = [{key: row[key] for key in NUMBERS if key in row} for row in records(save, "train/step")]
    if len(steps) < NUM_STEPS:
        raise RuntimeError(f"the job {name} took {len(steps)} steps instead of {NUM_STEPS}; see {log}")
    dumps = [torch.load(path, weights_only=False) for path in sorted((save / "dump").glob("*.pt"))]
    return {"steps": steps, "rollouts": [_digests(dump["samples"]) for dump in dumps]}


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}


def _digests(samples: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the shortened SHA-256 of all values of each column in the rollout."""
    digests: dict[str, Any] = {}
    for sample in samples:
        for name in COLUMNS:
            if sample.get(name) is not None:
                values = torch.as_tensor(sample[name]).contiguous()
                digests.setdefault(name, hashlib.sha256()).update(values.numpy().tobytes())
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}
