"""``--ci-test``: numbers of a step that a run in CI must have; one that is off ends the run.

* the first step of a rollout is on policy: ``ppo_kl`` is 0;
* at the very first step policy and reference are the same: ``kl_loss`` is 0;
* trainer and engines agree: ``train_rollout_logprob_abs_diff`` is below its threshold;
* the MTP loss is below 1;
* ``--ci-load-grad-norm``: the gradient norm is the one that another run saved with ``--ci-save-grad-norm``.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from slime.utils.errors import CheckError

logger = logging.getLogger(__name__)

ZERO = 1e-8
"""Nats; what counts as equal policies."""
MTP_LOSS_LIMIT = 1.0
GRAD_NORM_TOLERANCE = 0.01
"""Relative, or absolute where that is more."""


def check_step(
    args: Namespace, role: str, rollout_id: int, step_id: int, metrics: Mapping[str, float], grad_norm: float
) -> None:
    """Check one optimizer step on the rank that has its metrics.

    Args:
        metrics: of the step, without a prefix.
        grad_norm: before clipping.

    Raises:
        CheckError: names every number that is off.
    """
    if not args.ci_test:
        return
    problems = list(_wrong_numbers(args, rollout_id, step_id, metrics))
    names = {"role": role, "rollout_id": rollout_id, "step_id": step_id}
    if args.ci_save_grad_norm is not None:
        path = Path(args.ci_save_grad_norm.format(**names))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(grad_norm, path)
    if args.ci_load_grad_norm is not None:
        problems += _wrong_grad_norm(Path(args.ci_load_grad_norm.format(**names)), grad_norm)
    if problems:
        raise CheckError(f"CI check of {role}, rollout {rollout_id}, step {step_id}: " + "; ".join(problems) + ".")


def _wrong_numbers(args: Namespace, rollout_id: int, step_id: int, metrics: Mapping[str, float]) -> Iterator[str]:
    checks_kl = not args.ci_disable_kl_checker and step_id == 0
    # With other log-probs as the old ones, the first step is not on policy by definition.
    is_on_policy = not (args.use_rollout_logprobs or args.keep_old_actor)
    if checks_kl and is_on_policy and "ppo_kl" in metrics and not abs(metrics["ppo_kl"]) < ZERO:
        yield f"ppo_kl is {metrics['ppo_kl']:g}; on policy it must be below {ZERO:g} (--ci-disable-kl-checker)"
    if checks_kl and rollout_id == 0 and "kl_loss" in metrics and not abs(metrics["kl_loss"]) < ZERO:
        yield (
            f"kl_loss is {metrics['kl_loss']:g}; before the first update it must be below {ZERO:g}: is --ref-load "
            "what training began with? (--ci-disable-kl-checker)"
        )
    limit = args.ci_train_rollout_logprob_abs_diff_threshold
    name = "train_rollout_logprob_abs_diff"
    if name in metrics and not metrics[name] < limit:
        yield f"{name} is {metrics[name]:g}; --ci-train-rollout-logprob-abs-diff-threshold is {limit:g}"
    if "mtp_loss" in metrics and not metrics["mtp_loss"] < MTP_LOSS_LIMIT:
        yield f"mtp_loss is {metrics['mtp_loss']:g}; it must be below {MTP_LOSS_LIMIT:g}"


def _wrong_grad_norm(path: Path, grad_norm: float) -> Iterator[str]:
    if not path.exists():
        yield f"{path} of --ci-load-grad-norm does not exist; another run must have written it (--ci-save-grad-norm)"
        return
    saved = float(torch.load(path, weights_only=False))
    if not math.isclose(grad_norm, saved, rel_tol=GRAD_NORM_TOLERANCE, abs_tol=GRAD_NORM_TOLERANCE):
        yield f"grad_norm is {grad_norm:g}, and was {saved:g} in the run that wrote {path}"
