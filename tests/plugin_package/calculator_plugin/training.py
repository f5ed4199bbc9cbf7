"""Hooks that run in the trainer's ranks: data, advantages, importance weights, the loss."""

import torch

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.utils.ppo_utils import compute_approx_kl, compute_policy_loss


def convert(args, samples):
    """--custom-convert-samples-to-train-data-path: the training batch by hand."""
    rollout_ids = [s.rollout_id if s.rollout_id is not None else s.index for s in samples]
    masks = [list(s.loss_mask) if s.loss_mask is not None else [1] * s.response_length for s in samples]
    totals = {}
    for rollout_id, mask in zip(rollout_ids, masks, strict=True):
        totals[rollout_id] = totals.get(rollout_id, 0) + sum(mask)
    data = {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [s.get_reward_value(args) for s in samples],
        "raw_reward": [s.get_reward_value(args) for s in samples],
        "truncated": [int(s.status == s.Status.TRUNCATED) for s in samples],
        "sample_indices": [s.index for s in samples],
        "rollout_ids": rollout_ids,
        "loss_masks": masks,
        "rollout_mask_sums": [totals[r] for r in rollout_ids],
    }
    if samples[0].rollout_log_probs is not None:
        data["rollout_log_probs"] = [s.rollout_log_probs for s in samples]
    return data


def postprocess(args, rollout_id, rollout_data):
    """--rollout-data-postprocess-path: advantages are clipped in place."""
    rollout_data["advantages"] = [a.clamp(-2.0, 2.0) for a in rollout_data["advantages"]]
    rollout_data["calculator_rollout_id"] = rollout_id


def advantages(args, rollout_data):
    """--custom-advantage-function-path: the reward on every token, without a baseline."""
    out = [
        torch.full_like(kl, float(reward))
        for reward, kl in zip(rollout_data["rewards"], rollout_data["kl"], strict=True)
    ]
    rollout_data["advantages"] = out
    rollout_data["returns"] = [a.clone() for a in out]


def truncated_is(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """--custom-tis-function-path: one clamp, masks unchanged."""
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    weight = ratio.clamp(max=2.0)
    return pg_loss * weight, loss_masks, {"calculator_weight": weight}


def pg_loss_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """--custom-pg-loss-reducer-function-path: per-sample sums over a constant, as Dr. GRPO does."""

    def reduce(values):
        parts = values.split([len(mask) for mask in loss_masks])
        return sum((part * mask.to(part)).sum() for part, mask in zip(parts, loss_masks, strict=True)) / 16

    return reduce


def loss(args, batch, logits, sum_of_sample_mean):
    """--loss-type custom_loss: clipped policy gradient with a small pull towards the rollout's log-probs."""
    _, found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )
    log_probs = torch.cat(found["log_probs"])
    old = torch.cat(batch["log_probs"] if batch.get("log_probs") is not None else batch["rollout_log_probs"])
    advantage = torch.cat(batch["advantages"])
    pg, clipped = compute_policy_loss(old - log_probs, advantage, args.eps_clip, args.eps_clip_high)
    pull = compute_approx_kl(log_probs, old, kl_loss_type="k2")
    pg = sum_of_sample_mean(pg)
    pull = sum_of_sample_mean(pull)
    total = pg + 0.01 * pull
    return total, {
        "loss": total.clone().detach(),
        "calculator_pull": pull.clone().detach(),
        "calculator_clip": sum_of_sample_mean(clipped).clone().detach(),
        "calculator_entropy": sum_of_sample_mean(torch.cat(found["entropy"])).clone().detach(),
    }


CALLED = []


def megatron_init(args):
    CALLED.append("init")


def before_log_prob(args, model, store_prefix):
    CALLED.append(f"log_prob:{store_prefix}:{len(model)}")


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    CALLED.append(f"step:{rollout_id}:{step_id}")
