"""Numbers of a step that must be what they are, in every run: a self-check, and the checks of ``--ci-test``.

Always looked at, because they can only be off when something is wrong with the trainer; a warning, which ``--ci-test``
makes an error:

* the first step of a rollout is on policy: ``ppo_kl`` is 0;
* before the first update policy and reference are the same: ``kl_loss`` and ``rollout/kl`` are 0.

With ``--ci-test`` also:

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
from slime.utils.safe_pickle import read_torch_file

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

    Raises:
        CheckError: with ``--ci-test``; names every number that is off.
    """
    where = f"{role}, rollout {rollout_id}, step {step_id}"
    problems = list(_off_policy_at_the_start(args, role, rollout_id, step_id, metrics))
    if not args.ci_test:
        _warn(where, problems)
        return
    problems += _wrong_numbers(args, metrics)
    names = {"role": role, "rollout_id": rollout_id, "step_id": step_id}
    if args.ci_save_grad_norm is not None:
        path = Path(args.ci_save_grad_norm.format(**names))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(grad_norm, path)
    if args.ci_load_grad_norm is not None:
        problems += _wrong_grad_norm(Path(args.ci_load_grad_norm.format(**names)), grad_norm)
    if problems:
        raise CheckError(f"CI check of {where}: " + "; ".join(problems) + ".")


def check_rollout(args: Namespace, role: str, rollout_id: int, metrics: Mapping[str, float]) -> None:
    """Check what is known of a rollout before its first step, on the rank that has its metrics.

    Raises:
        CheckError: with ``--ci-test``.
    """
    kl = metrics.get("rollout/kl")
    is_recomputed = not (args.use_rollout_logprobs or args.keep_old_actor)
    if role != "actor" or args.kl_coef == 0 or kl is None or not is_recomputed or args.ci_disable_kl_checker:
        return
    if _starts_from_reference(args, rollout_id) and not abs(kl) < ZERO:
        problem = f"rollout/kl is {kl:g}; {_NOT_THE_REFERENCE}"
        if args.ci_test:
            raise CheckError(f"CI check of {role}, rollout {rollout_id}: {problem}.")
        _warn(f"{role}, rollout {rollout_id}", [problem])


def _warn(where: str, problems: list[str]) -> None:
    for problem in problems:
        logger.warning("Self-check of %s: %s.", where, problem)


def _off_policy_at_the_start(
    args: Namespace, role: str, rollout_id: int, step_id: int, metrics: Mapping[str, float]
) -> Iterator[str]:
    if role != "actor" or step_id != 0 or args.loss_type != "policy_loss" or args.ci_disable_kl_checker:
        return
    # With other log-probs as the old ones, the first step is not on policy by definition.
    is_on_policy = not (args.use_rollout_logprobs or args.keep_old_actor)
    if is_on_policy and "ppo_kl" in metrics and not abs(metrics["ppo_kl"]) < ZERO:
        yield (
            f"ppo_kl is {metrics['ppo_kl']:g}; at the first step of a rollout it must be below {ZERO:g}, because no "
            "weight has changed since the log-probs were recomputed. The two forward passes saw different weights, "
            "tokens or experts, or compute differently (--ci-disable-kl-checker)"
        )
    if _starts_from_reference(args, rollout_id) and "kl_loss" in metrics and not abs(metrics["kl_loss"]) < ZERO:
        yield f"kl_loss is {metrics['kl_loss']:g}; {_NOT_THE_REFERENCE}"


_NOT_THE_REFERENCE = (
    f"before the first update it must be below {ZERO:g}, because policy and reference have the same weights: is "
    "--ref-load what training began with, and is it loaded the same way? (--ci-disable-kl-checker)"
)


def _starts_from_reference(args: Namespace, rollout_id: int) -> bool:
    """Return True while the actor is what ``--ref-load`` holds; ``--ci-test`` takes that for granted at the start."""
    if args.use_rollout_routing_replay:
        return False  # the same weights, but only the policy's experts are the engine's
    first = args.num_critic_only_steps if args.use_critic else 0
    return rollout_id == first and (args.ci_test or (args.ref_load is not None and args.load == args.ref_load))


def _wrong_numbers(args: Namespace, metrics: Mapping[str, float]) -> Iterator[str]:
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
    saved = float(read_torch_file(path))
    if not math.isclose(grad_norm, saved, rel_tol=GRAD_NORM_TOLERANCE, abs_tol=GRAD_NORM_TOLERANCE):
        yield f"grad_norm is {grad_norm:g}, and was {saved:g} in the run that wrote {path}"
