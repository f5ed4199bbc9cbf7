"""The weights of TIS in a job that is one rollout ahead, computed again by transformers from what the job left behind.

    python -m tests.e2e.algorithms --only grpo_one_step_tis --rollouts 8 --keep-checkpoints --out runs/tis -- \\
        --save-interval 1 --save-debug-rollout-data runs/tis/dumps/{rollout_id}.pt
    python -m tests.e2e.tis_weights runs/tis

Rollout k is generated with the weights after k - 1 updates (rollout 0 with the first ones, like rollout 1) and trained
on with those after k, so with w = pi_k(token) / pi_{k-1}(token):

    train/ois          the mean of w over the tokens of a sample, and over samples
    train/tis_abs      the same of |w - 1|
    train/tis_clipfrac the same of w > --tis-clip

The exports of the job (``hf/k``) give pi_k without the trainer, the dumps give what the engine said.  Exit code 0 when
the engine's log-probs are those of the weights one update behind, the metrics those of the weights w, and w is not 1.
Needs the job in fp32, so on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.backends.sglang_utils import cpu_shim
from slime.observability.metrics_file import FILE_NAME, merge_by_step, read_records

TIS_CLIP = 2.0
"""Of the row in ``algorithm_variants``."""
ENGINE_ERROR = 1e-4
"""Nats; two implementations in fp32."""
METRIC_ERROR = 1e-4


@cache
def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def log_probs(folder: Path, samples: Sequence[dict]) -> list[Tensor]:
    """[R] each: the log-probs of the response tokens under an exported model."""
    longest = max(len(sample["tokens"]) for sample in samples)
    tokens_NT = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, sample in zip(tokens_NT, samples, strict=True):
        row[: len(sample["tokens"])] = torch.tensor(sample["tokens"])
    all_NTV = _model(folder)(input_ids=tokens_NT).logits.float().log_softmax(-1)
    taken_NT = all_NTV[:, :-1].gather(-1, tokens_NT[:, 1:, None]).squeeze(-1)
    ends = [len(sample["tokens"]) - 1 for sample in samples]
    return [
        taken_T[end - sample["response_length"] : end]
        for taken_T, end, sample in zip(taken_NT, ends, samples, strict=True)
    ]


def mean_of_means(values_N: Sequence[Tensor]) -> float:
    """The mean over samples of the mean over their tokens, as the trainer reduces its metrics."""
    return sum(values_R.float().mean().item() for values_R in values_N) / len(values_N)


def check_rollout(samples: Sequence[dict], engine: Path, trainer: Path, metrics: dict[str, float]) -> list[str]:
    """Compare one rollout; prints its numbers and gives a line for each that is off."""
    said_N = [torch.tensor(sample["rollout_log_probs"]) for sample in samples]
    pairs = zip(log_probs(engine, samples), said_N, strict=True)
    engine_error = max((ours_R - said_R).abs().max().item() for ours_R, said_R in pairs)
    weight_N = [(ours - said).exp() for ours, said in zip(log_probs(trainer, samples), said_N, strict=True)]
    expected = {
        "ois": mean_of_means(weight_N),
        "tis_abs": mean_of_means([(weight_R - 1).abs() for weight_R in weight_N]),
        "tis_clipfrac": mean_of_means([weight_R > TIS_CLIP for weight_R in weight_N]),
    }
    there = {name: metrics[f"train/{name}"] for name in expected}
    numbers = ", ".join(f"{name} {there[name]:.5f} (here {value:.5f})" for name, value in expected.items())
    print(f"the engine's log-probs to {engine_error:.0e}; {numbers}", flush=True)
    problems = [] if engine_error < ENGINE_ERROR else [f"the engine's log-probs are off by {engine_error:.1e}"]
    for name, value in expected.items():
        if not abs(there[name] - value) < METRIC_ERROR:
            problems.append(f"train/{name} is {there[name]:.6f}, and {value:.6f} by transformers")
    if engine != trainer and not there["tis_abs"] > METRIC_ERROR:
        problems.append(f"train/tis_abs is {there['tis_abs']:.6f}, although the engine is an update behind")
    return problems


def main() -> None:
    """Check every rollout that was dumped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the --out of tests.e2e.algorithms")
    parser.add_argument("--warm-start", type=Path, default=Path("runs/tiny"), help="what the job started from")
    options = parser.parse_args()
    cpu_shim.install()  # transformers cannot import its models beside a torchvision that does not fit this torch
    run = next(options.out.glob("grpo_one_step_tis-seed*"))
    steps = merge_by_step(read_records(run / FILE_NAME), "train/step")
    after = [options.warm_start / "sft" / "hf", *(run / "hf" / str(rollout) for rollout in steps)]
    problems = []
    for rollout, metrics in steps.items():
        samples = torch.load(options.out / "dumps" / f"{rollout}.pt", weights_only=False)["samples"]
        found = check_rollout(samples, after[max(rollout - 1, 0)], after[rollout], metrics)
        problems += [f"rollout {rollout}: {problem}" for problem in found]
    for problem in problems:
        print(problem)
    print(f"{len(steps)} rollouts, {len(problems)} problems")
    sys.exit(1 if problems or not steps else 0)


if __name__ == "__main__":
    main()
