"""The expected results of a whole training step, from ``reference``: advantages, loss, metrics.

``args`` are the trainer's own flags, and only this module reads them; the formulas are all in ``reference``.  The
policy is a table: the logits after a token are a row of it, so that every part of the gradient can be distinguished.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor

from tests.oracle import reference
from tests.oracle.mismatch import as_tensors, multiple_importance_sampling
from tests.oracle.plugins import TOKENS_OF_A_STEP
from tests.oracle.reference import Example, f64
from tests.oracle.variants import GROUP_SIZE, MIS_SETTINGS, RLOO


def teacher_log_probs(example: Example) -> Tensor:
    """Log-probs of a policy other than any of the example's."""
    return 0.6 * f64(example.reference) - 0.2


def estimator_rewards(args: Namespace, examples: list[Example]) -> list[float]:
    """The estimator's input for each sample's reward."""
    if args.advantage_estimator == RLOO:
        return reference.relative_rewards(examples, GROUP_SIZE, "others", divide_by_std=False)
    if args.advantage_estimator in ("grpo", "gspo", "cispo"):
        return reference.relative_rewards(examples, GROUP_SIZE, "mean", args.grpo_std_normalization)
    if args.advantage_estimator == "reinforce_plus_plus_baseline":
        return reference.relative_rewards(examples, GROUP_SIZE, "mean", divide_by_std=False)
    return [example.reward for example in examples]


def advantages_and_returns(args: Namespace, examples: list[Example]) -> tuple[list[Tensor], list[Tensor]]:
    """Of every example of the rollout, for all steps together."""
    kind = args.advantage_estimator
    raw = examples
    examples = [
        Example(**{**vars(example), "reward": reward})
        for example, reward in zip(raw, estimator_rewards(args, raw), strict=True)
    ]
    advantages, returns = [], []
    for number, example in enumerate(examples):
        ours = f64(example.rollout if args.use_rollout_logprobs else example.old)
        penalty = reference.kl(ours, f64(example.reference), args.kl_loss_type) * (1.0 if args.kl_coef else 0.0)
        if args.custom_advantage_function_path is not None:
            advantage = target = reference.leave_one_out(raw, raw[number])
        elif kind == "ppo":
            advantage, target = reference.gae(example, penalty, args.kl_coef, args.gamma, args.lambd)
        elif kind == "reinforce_plus_plus":
            advantage = target = reference.reinforce_plus_plus(example, penalty, args.kl_coef, args.gamma)
        elif kind == "reinforce_plus_plus_baseline":
            advantage = target = reference.reinforce_plus_plus_baseline(example, penalty, args.kl_coef)
        else:
            advantage = target = reference.reward_on_every_token(example)
        if args.use_opd:
            advantage = advantage - args.opd_kl_coef * (ours - teacher_log_probs(example))
        advantages.append(advantage)
        returns.append(target)
    if args.normalize_advantages:
        advantages = reference.whitened(advantages, examples)
    return advantages, returns


def policy_tokens(args: Namespace, example: Example, logits: Tensor, advantage: Tensor) -> dict[str, Tensor]:
    """Per-token loss and metrics of one sample, to be reduced over the step."""
    log_prob = reference.response_log_probs(example, logits, args.rollout_temperature, args.rollout_top_p != 1.0)
    entropy = reference.response_entropies(example, logits, args.rollout_temperature)
    if args.use_rollout_logprobs:
        old = f64(example.rollout)
    elif args.reuse_log_probs:
        old = log_prob.detach()
    else:
        old = f64(example.old)
    sample = Example(**{**vars(example), "old": old.tolist()})
    low, high = args.eps_clip, args.eps_clip_high
    ratio = (log_prob - old).exp()
    if args.advantage_estimator == "gspo":
        log_ratio = reference.mean_over_trained_tokens(log_prob - old, example)
        ratio = log_ratio.exp().expand(example.response_length)
    clipped = reference.is_clipped(ratio.detach(), advantage, low, high)
    if args.advantage_estimator == "cispo":
        loss = reference.cispo_losses(sample, log_prob, advantage, low, high)
        clipped = ((ratio < 1 - low) | (ratio > 1 + high)).double()
    else:
        loss = reference.clipped_surrogate(ratio, advantage, low, high, args.eps_clip_c)
    found = {"pg_clipfrac": clipped, "ppo_kl": -ratio.detach().log(), "entropy_loss": entropy}
    if args.use_opsm:
        keeps = reference.opsm_keeps(sample, log_prob, advantage, args.opsm_delta)
        loss = loss * keeps
        found["opsm_clipfrac"] = 1 - keeps
    keeps = f64([1.0] * example.response_length)
    if args.use_tis or args.get_mismatch_metrics or getattr(args, "use_rs", False):
        correction, weights, keeps = correct(args, example, old if args.reuse_log_probs else f64(example.old))
        found |= correction
        if args.use_tis:
            loss = loss * weights
        loss = loss * keeps
        entropy = entropy * keeps
        found["entropy_loss"] = entropy
    found["pg_loss"] = loss
    loss = loss - args.entropy_coef * entropy
    if args.use_kl_loss:
        correction = (log_prob - old).exp() if args.use_unbiased_kl else 1.0
        penalty = reference.kl(log_prob, f64(example.reference), args.kl_loss_type, correction)
        found["kl_loss"] = penalty * keeps
        loss = loss + args.kl_loss_coef * found["kl_loss"]
    ours = log_prob.detach() if args.use_rollout_logprobs else old
    found["train_rollout_logprob_abs_diff"] = (ours - f64(example.rollout)).abs()
    return {"loss": loss, **found}


def correct(args: Namespace, example: Example, train: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Metrics, weight and 0 or 1 of each token, from the mismatch between trainer and engine."""
    sample = Example(**{**vars(example), "old": train.tolist()})
    weight = (train - f64(example.rollout)).exp()
    everything = torch.ones_like(weight)
    if str(args.custom_tis_function_path).endswith("compute_mis_weights_with_cp"):
        settings = {name: getattr(args, name) for name in MIS_SETTINGS}
        [verdict] = multiple_importance_sampling([sample], settings)
        metrics = {f"mis_{name}": f64(values) for name, values in verdict.metrics.items()}
        return {"ois": weight, **metrics}, *as_tensors(verdict)
    is_icepop = args.custom_tis_function_path is not None
    metrics = {"ois": weight, "tis": weight, "tis_abs": (weight - 1).abs()}
    metrics["tis_clipfrac"] = ((weight < args.tis_clip_low) | (weight > args.tis_clip)).double()
    return metrics, reference.mismatch_weights(sample, args.tis_clip_low, args.tis_clip, drop=is_icepop), everything


def step_tokens(
    args: Namespace, example: Example, logits: Tensor, advantage: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """Per-token loss and metrics of one sample under ``--loss-type`` (``value_loss`` is the critic's)."""
    if args.loss_type == "sft_loss":
        return {"loss": -reference.response_log_probs(example, logits, args.rollout_temperature)}
    if args.loss_type == "custom_loss":
        return {"loss": reference.response_log_probs(example, logits, args.rollout_temperature) ** 2}
    if args.loss_type == "value_loss":
        start = example.prompt_length - 1
        values = logits[start : start + example.response_length, 0]
        losses = reference.value_losses(values, example, target, args.value_clip)
        return {"value_loss": losses, "value_clipfrac": (losses > (values - target) ** 2).double()}
    return policy_tokens(args, example, logits, advantage)


def expected_steps(
    args: Namespace, examples: list[Example], table: Tensor, rollouts_per_step: int
) -> list[tuple[dict[str, float], Tensor]]:
    """[step] the metrics (including the loss) and the gradient of the loss with respect to ``table``."""
    advantages, targets = advantages_and_returns(args, examples)
    rows = list(zip(examples, advantages, targets, strict=True))
    mean = reference.mean_over_tokens if args.calculate_per_token_loss else reference.mean_over_rollouts
    rollout_ids = list(dict.fromkeys(example.rollout_id for example in examples))
    steps = []
    for first in range(0, len(rollout_ids) // rollouts_per_step * rollouts_per_step, rollouts_per_step):
        chosen = set(rollout_ids[first : first + rollouts_per_step])
        parameters = table.clone().requires_grad_()
        real = parameters[:, : args.vocab_size]  # without the columns that pad the vocabulary
        tokens = [
            (example, step_tokens(args, example, real[torch.tensor(example.tokens)], advantage, target))
            for example, advantage, target in rows
            if example.rollout_id in chosen
        ]
        of_step = [example for example, _ in tokens]
        means = {name: mean([found[name] for _, found in tokens], of_step) for name in tokens[0][1]}
        if args.custom_pg_loss_reducer_function_path is not None:
            surrogates = [found["pg_loss"] for _, found in tokens]
            own = reference.sum_over_constant(surrogates, of_step, TOKENS_OF_A_STEP) / rollouts_per_step
            means["loss"] = means["loss"] - means["pg_loss"] + own
            means["pg_loss"] = own
        if args.loss_type == "custom_loss":
            means["custom"] = 2 * means["loss"]
        loss = means.get("loss", means.get("value_loss"))
        (loss + 0 * parameters.sum()).backward()  # a step may have nothing to train
        steps.append(({name: value.item() for name, value in means.items()}, parameters.grad))
    return steps
