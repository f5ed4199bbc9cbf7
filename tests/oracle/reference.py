"""The whole loss of a training step, written as plainly as possible: float64, one sample at a time, loops over tokens.

Nothing here is packed, chunked, sharded or fast, and nothing is imported from slime: it is the definition that
slime is compared with.  Read it top to bottom in this order: which tokens count, log-probabilities, rewards and
advantages, token losses, the mean.

Conventions: lists over samples are plain lists, a tensor belongs to one sample; position p of the logits predicts
token p + 1; every per-token tensor has one entry per response token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Example:
    """One trained sequence.  Examples with the same ``rollout_id`` came from one execution of a prompt."""

    tokens: list[int]
    response_length: int
    mask: list[int]
    """1 for each trained response token (written by the model), else 0 (written by a tool)."""
    rollout_id: int
    reward: float = 0.0
    old: list[float] = field(default_factory=list)
    """Log-probability of each response token under the policy before the step."""
    rollout: list[float] = field(default_factory=list)
    """... as recorded by the engine while sampling."""
    reference: list[float] = field(default_factory=list)
    """... under the reference policy."""
    values: list[float] = field(default_factory=list)
    """The critic's prediction before each response token."""
    nucleus: list[list[int]] = field(default_factory=list)
    """The tokens from which top-p sampling chose each response token; empty if not recorded."""

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length


def f64(values) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


# Log-probabilities


def log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    scaled = logits.double() / temperature
    return scaled - torch.logsumexp(scaled, dim=-1, keepdim=True)


def response_log_probs(example: Example, logits: Tensor, temperature: float = 1.0, top_p: bool = False) -> Tensor:
    """Log-probability of each response token, from the [L, V] logits of the whole sequence.

    With top_p, only over the tokens of its nucleus, which includes the chosen one.
    """
    chosen = []
    for position in range(example.prompt_length, len(example.tokens)):
        token, row = example.tokens[position], logits[position - 1]
        nucleus = example.nucleus[position - example.prompt_length] if top_p else []
        if nucleus:
            others = [other for other in nucleus if other != token]
            chosen.append(log_softmax(row[[token, *others]], temperature)[0])
        else:
            chosen.append(log_softmax(row, temperature)[token])
    return torch.stack(chosen) if chosen else logits.double().sum() * torch.zeros(0, dtype=torch.float64)


def response_entropies(example: Example, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of the distribution from which each response token was sampled."""
    entropies = []
    for position in range(example.prompt_length, len(example.tokens)):
        log_p = log_softmax(logits[position - 1], temperature)
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(entropies) if entropies else logits.double().sum() * torch.zeros(0, dtype=torch.float64)


def kl(log_prob: Tensor, base: Tensor, kind: str, ratio: Tensor | float = 1.0) -> Tensor:
    """Estimate of the KL divergence from base, per token; ``ratio`` corrects for an older sampling policy."""
    difference = log_prob - base
    if kind == "k1":
        return ratio * difference
    if kind == "k2":
        return ratio * difference**2 / 2
    k3 = ratio * (torch.exp(-difference) - 1 + difference)
    return k3.clamp(-10, 10) if kind == "low_var_kl" else k3


# Rewards and advantages


def group_normalised(rewards: list[float], group_size: int, divide_by_std: bool = True) -> list[float]:
    """Reward minus the mean of its group, over the unbiased standard deviation plus 1e-6."""
    normalised: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        mean = sum(group) / len(group)
        std = 1.0
        if divide_by_std and len(group) > 1:
            std = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (len(group) - 1)) + 1e-6
        normalised += [(reward - mean) / std for reward in group]
    return normalised


def relative_rewards(examples: list[Example], group_size: int, baseline: str, divide_by_std: bool) -> list[float]:
    """Reward of each sample relative to the prompt's rollouts, each of which counts once.

    ``baseline``: mean (GRPO and its kin, REINFORCE++-baseline), or others (RLOO: the mean of the other rollouts).
    """
    of_rollout: dict[int, list[float]] = {}
    for example in examples:
        of_rollout.setdefault(example.rollout_id, []).append(example.reward)
    rewards = {rollout: sum(found) / len(found) for rollout, found in of_rollout.items()}
    relative = []
    for example in examples:
        prompt = example.rollout_id // group_size
        group = {rollout: reward for rollout, reward in rewards.items() if rollout // group_size == prompt}
        if baseline == "others":
            group_without = [reward for rollout, reward in group.items() if rollout != example.rollout_id]
            relative.append(example.reward - sum(group_without) / len(group_without))
            continue
        mean, std = sum(group.values()) / len(group), 1.0
        if divide_by_std and len(group) > 1:
            std = math.sqrt(sum((reward - mean) ** 2 for reward in group.values()) / (len(group) - 1)) + 1e-6
        relative.append((example.reward - mean) / std)
    return relative


def reward_on_every_token(example: Example) -> Tensor:
    """GRPO, GSPO, CISPO."""
    return torch.full((example.response_length,), example.reward, dtype=torch.float64)


def leave_one_out(examples: list[Example], example: Example) -> Tensor:
    """RLOO: the reward minus the mean reward of all the others."""
    others = [other.reward for other in examples if other is not example]
    return torch.full((example.response_length,), example.reward - sum(others) / len(others), dtype=torch.float64)


def reinforce_plus_plus(example: Example, kl_penalty: Tensor, kl_coef: float, gamma: float) -> Tensor:
    """Discounted sum of a KL penalty on each trained token and the reward on the last trained one."""
    return gae(example, kl_penalty, kl_coef, gamma, lambd=1.0, values=[0.0] * example.response_length)[0]


def reinforce_plus_plus_baseline(example: Example, kl_penalty: Tensor, kl_coef: float) -> Tensor:
    return example.reward - kl_coef * kl_penalty.double()


def gae(
    example: Example,
    kl_penalty: Tensor,
    kl_coef: float,
    gamma: float,
    lambd: float,
    values: list[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO: advantages and returns of the trained tokens, the only time steps; 0 on the others.

    The reward is on the last step, and the value after it is 0.
    """
    values = example.values if values is None else values
    steps = [position for position, trains in enumerate(example.mask) if trains]
    advantages, returns = torch.zeros(2, example.response_length, dtype=torch.float64)
    next_value, next_advantage = 0.0, 0.0
    for position in reversed(steps):
        reward = -kl_coef * float(kl_penalty[position]) + (example.reward if position == steps[-1] else 0.0)
        delta = reward + gamma * next_value - values[position]
        next_advantage = delta + gamma * lambd * next_advantage
        next_value = values[position]
        advantages[position], returns[position] = next_advantage, next_advantage + next_value
    return advantages, returns


def whitened(advantages: list[Tensor], examples: list[Example]) -> list[Tensor]:
    """Normalized by the mean and unbiased variance of all trained tokens of the rollout."""
    trained = [
        float(advantage)
        for row, example in zip(advantages, examples, strict=True)
        for advantage, trains in zip(row, example.mask, strict=True)
        if trains
    ]
    mean = sum(trained) / len(trained)
    variance = sum((value - mean) ** 2 for value in trained) / max(len(trained) - 1, 1)
    return [(row - mean) / math.sqrt(variance + 1e-8) for row in advantages]


# Token losses


def mean_over_trained_tokens(values: Tensor, example: Example) -> Tensor:
    total = sum((value for value, trains in zip(values, example.mask, strict=True) if trains), f64(0.0))
    return total / max(sum(example.mask), 1)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """PPO's pessimistic loss; where A < 0, at most ``dual * |A|``."""
    losses = []
    for r, advantage in zip(ratio, advantages, strict=True):
        loss = max(-r * advantage, -r.clamp(1 - low, 1 + high) * advantage)
        if dual is not None and advantage < 0:
            loss = min(loss, -dual * advantage)
        losses.append(loss)
    return torch.stack(losses) if losses else ratio


def is_clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """1 where the clipped term is the larger loss: a gain outside the trust region."""
    gains = [
        (advantage > 0 and r > 1 + high) or (advantage < 0 and r < 1 - low)
        for r, advantage in zip(ratio.tolist(), advantages.tolist(), strict=True)
    ]
    return f64([float(gain) for gain in gains])


def ppo_losses(example: Example, log_prob: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return clipped_surrogate((log_prob - f64(example.old)).exp(), advantages, low, high)


def gspo_losses(example: Example, log_prob: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """One ratio for all tokens of the sequence."""
    log_ratio = mean_over_trained_tokens(log_prob - f64(example.old), example)
    return clipped_surrogate(log_ratio.exp().expand(example.response_length), advantages, low, high)


def cispo_losses(example: Example, log_prob: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """The clipped ratio is a constant weight."""
    weight = (log_prob.detach() - f64(example.old)).exp().clamp(1 - low, 1 + high)
    return -weight * advantages * log_prob


def opsm_keeps(example: Example, log_prob: Tensor, advantages: Tensor, delta: float) -> Tensor:
    """0 for negative-advantage tokens of a sequence that has moved away by more than delta, else 1."""
    drift = mean_over_trained_tokens(f64(example.old) - log_prob.detach(), example)
    return f64([0.0 if advantage < 0 and drift > delta else 1.0 for advantage in advantages.tolist()])


def mismatch_weights(example: Example, low: float, high: float, drop: bool) -> Tensor:
    """Trainer over engine: clamped to the bounds (TIS), or 0 outside them (IcePop)."""
    weights = (f64(example.old) - f64(example.rollout)).exp()
    if drop:
        return f64([float(weight) if low <= weight <= high else 0.0 for weight in weights])
    return weights.clamp(low, high)


def value_losses(values: Tensor, example: Example, returns: Tensor, clip: float) -> Tensor:
    old = f64(example.values)
    bounded = torch.minimum(torch.maximum(values, old - clip), old + clip)
    return torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)


# The mean


def mean_over_rollouts(token_losses: list[Tensor], examples: list[Example]) -> Tensor:
    """Mean over rollouts of the mean over the rollout's trained tokens, however they are split into samples."""
    total = f64(0.0)
    rollout_ids = sorted({example.rollout_id for example in examples})
    for rollout_id in rollout_ids:
        summed, count = f64(0.0), 0
        for losses, example in zip(token_losses, examples, strict=True):
            if example.rollout_id == rollout_id:
                summed = summed + sum((x for x, m in zip(losses, example.mask, strict=True) if m), f64(0.0))
                count += sum(example.mask)
        total = total + summed / max(count, 1)
    return total / len(rollout_ids)


def mean_over_tokens(token_losses: list[Tensor], examples: list[Example]) -> Tensor:
    """Mean over all trained tokens; a sample without any counts as one token of loss 0."""
    summed, count = f64(0.0), 0
    for losses, example in zip(token_losses, examples, strict=True):
        summed = summed + sum((x for x, m in zip(losses, example.mask, strict=True) if m), f64(0.0))
        count += max(sum(example.mask), 1)
    return summed / count


def sum_over_constant(token_losses: list[Tensor], examples: list[Example], constant: float) -> Tensor:
    """Dr. GRPO: a trained token has the same weight in short and long responses, and in small and large batches."""
    summed = f64(0.0)
    for losses, example in zip(token_losses, examples, strict=True):
        summed = summed + sum((x for x, m in zip(losses, example.mask, strict=True) if m), f64(0.0))
    return summed / constant
