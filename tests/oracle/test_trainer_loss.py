"""The trainer's own loss function on real ranks (two data-parallel, two context-parallel, two vocabulary shards)
against the reference: the same step loss and the same gradient.

Where ``test_split_invariance`` runs the pure pieces in one process, here parallel state, gathers and gradient
collectives are the trainer's, and only the model is a table of bigram logits.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.train_data.convert import samples_to_train_data
from slime.train_data.schedule import ScheduleConfig, build_dp_schedule
from slime.train_data.split import split_by_rank
from tests.dist.gloo_ranks import run_ranks
from tests.oracle import reference
from tests.oracle.batches import VOCABULARY, as_samples, bigram_policy, random_examples

COLUMNS = VOCABULARY + 1  # even, so that two shards are alike
SEED = 3
LAYOUTS = {"dp2": {}, "cp2": {"context_parallel_size": 2}, "tp2": {"tensor_model_parallel_size": 2}}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"advantage_estimator": "gspo"},
    "cispo": {"advantage_estimator": "cispo"},
    "per_token": {"calculate_per_token_loss": True},
    "tis": {"use_tis": True},
    "opsm": {"use_opsm": True},
    "recompute": {"recompute_loss_function": True},
}


def arguments(**changes: Any) -> Namespace:
    defaults = {
        "vocab_size": VOCABULARY,
        "advantage_estimator": "grpo",
        "calculate_per_token_loss": False,
        "recompute_loss_function": False,
        "rollout_temperature": 0.9,
        "log_probs_chunk_size": 4,
        "entropy_coef": 0.01,
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "eps_clip_c": None,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "k3",
        "use_unbiased_kl": False,
        "use_rollout_logprobs": False,
        "use_opsm": False,
        "opsm_delta": 0.1,
        "use_tis": False,
        "get_mismatch_metrics": False,
        "tis_clip": 1.8,
        "tis_clip_low": 0.5,
        "custom_tis_function_path": None,
        "custom_pg_loss_reducer_function_path": None,
        "custom_advantage_function_path": None,
        "kl_coef": 0.0,
        "gamma": 1.0,
        "lambd": 1.0,
        "use_opd": False,
        "normalize_advantages": True,
    }
    return Namespace(**{**defaults, **changes})


def table() -> torch.Tensor:
    """Logits of the next token, with one column of vocabulary padding, which must not count."""
    return torch.cat([bigram_policy(SEED), torch.full((VOCABULARY, 1), 2.0, dtype=torch.float64)], dim=1)


def step_of_this_rank(layout: str, variant: str) -> dict[str, Any]:
    """Loss and gradient of one step, summed as Megatron sums them."""
    from megatron.core import mpu

    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
    from slime.backends.megatron_utils.data import DataIterator, get_batch, prepare_rollout_data
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns, loss_function

    args = arguments(**VARIANTS[variant])
    dp_size, cp_size = mpu.get_data_parallel_world_size(), mpu.get_context_parallel_world_size()
    tp_rank, tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()

    examples = random_examples(SEED)
    rewards = [example.reward for example in examples]
    train_data = samples_to_train_data(as_samples(examples), rewards, rewards)
    config = ScheduleConfig(dp_size=dp_size, cp_size=cp_size, use_dynamic_batch_size=True, max_tokens_per_gpu=30)
    num_rollouts = len(set(train_data["rollout_ids"]))
    schedule = build_dp_schedule(
        config,
        [len(tokens) for tokens in train_data["tokens"]],
        global_batch_size=num_rollouts,
        rollout_indices=train_data["rollout_ids"],
    )
    data = prepare_rollout_data(split_by_rank(train_data, schedule)[mpu.get_data_parallel_rank()])
    picked = [examples[position] for position in data["partition"]]
    for name, field in (("log_probs", "old"), ("ref_log_probs", "reference")):
        data[name] = [
            slice_log_prob_with_cp(torch.tensor(getattr(e, field)), len(e.tokens), e.response_length) for e in picked
        ]
    compute_advantages_and_returns(args, data)

    shard = slice(tp_rank * COLUMNS // tp_size, (tp_rank + 1) * COLUMNS // tp_size)
    parameters = table().float()[:, shard].clone().requires_grad_()
    iterator = DataIterator(data, data["micro_batch_indices"])
    keys = ["tokens", "total_lengths", "response_lengths", "loss_masks", "log_probs", "ref_log_probs", "advantages"]
    keys += ["rollout_log_probs", "rollout_mask_sums"]
    num_microbatches = schedule.num_microbatches[0]
    loss, num_tokens = torch.zeros(()), torch.zeros(())
    for _ in range(num_microbatches):
        batch = get_batch(iterator, keys, pad_multiplier=4)
        logits = parameters[batch["tokens"]]
        scaled, normaliser, _ = loss_function(args, batch, num_microbatches, num_rollouts, "policy_loss", logits)
        # as Megatron's schedule: divided by the micro-batches, or left for the division by the number of tokens
        loss = loss + (scaled if args.calculate_per_token_loss else scaled / num_microbatches)
        num_tokens += normaliser
    loss.backward()
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    total = loss.detach().clone()
    for tensor in (total, parameters.grad, num_tokens):
        dist.all_reduce(tensor, group=group)
    divisor = num_tokens if args.calculate_per_token_loss else dist.get_world_size(group)
    return {"loss": (total / divisor).item(), "grad": (parameters.grad / divisor).tolist(), "tp_rank": tp_rank}


def all_steps_of_this_rank(layout: str) -> dict[str, dict[str, Any]]:
    from slime.backends.megatron_utils import cpu_platform  # noqa: F401

    # isort: split
    from megatron.core import mpu

    torch.manual_seed(0)
    mpu.initialize_model_parallel(**LAYOUTS[layout])
    results = {variant: step_of_this_rank(layout, variant) for variant in VARIANTS}
    mpu.destroy_model_parallel()
    return results


def every_layout_of_this_rank() -> dict[str, dict[str, dict[str, Any]]]:
    return {layout: all_steps_of_this_rank(layout) for layout in LAYOUTS}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, dict[str, Any]]]]:
    """What both ranks computed; one start of two processes serves all tests here."""
    return run_ranks(every_layout_of_this_rank, 2)


def expected_step(variant: str) -> tuple[torch.Tensor, torch.Tensor]:
    args = arguments(**VARIANTS[variant])
    examples = random_examples(SEED)
    parameters = table().requires_grad_()
    advantages = reference.whitened([reference.reward_on_every_token(example) for example in examples], examples)
    losses_of = {"gspo": reference.gspo_losses, "cispo": reference.cispo_losses}
    losses_of = losses_of.get(args.advantage_estimator, reference.ppo_losses)
    token_losses = []
    for example, advantage in zip(examples, advantages, strict=True):
        logits = parameters[torch.tensor(example.tokens), :VOCABULARY]
        log_prob = reference.response_log_probs(example, logits, args.rollout_temperature)
        losses = losses_of(example, log_prob, advantage, args.eps_clip, args.eps_clip_high)
        if args.use_opsm:
            losses = losses * reference.opsm_keeps(example, log_prob, advantage, args.opsm_delta)
        if args.use_tis:
            losses = losses * reference.mismatch_weights(example, args.tis_clip_low, args.tis_clip, drop=False)
        losses = losses + args.kl_loss_coef * reference.kl(log_prob, reference.f64(example.reference), "k3")
        entropies = reference.response_entropies(example, logits, args.rollout_temperature)
        token_losses.append(losses - args.entropy_coef * entropies)
    mean = reference.mean_over_tokens if args.calculate_per_token_loss else reference.mean_over_rollouts
    loss = partial(mean, token_losses)(examples)
    loss.backward()
    return loss.detach(), parameters.grad


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_step_loss_and_gradient_are_those_of_the_reference(ranks, layout, variant):
    wanted_loss, wanted_gradient = expected_step(variant)
    results = [rank[layout][variant] for rank in ranks]
    for result in results:
        assert result["loss"] == pytest.approx(float(wanted_loss), rel=2e-5, abs=2e-6)
    gradients = [torch.tensor(result["grad"], dtype=torch.float64) for result in results]
    found = torch.cat(gradients, dim=1) if layout == "tp2" else gradients[0]
    torch.testing.assert_close(found, wanted_gradient, rtol=2e-4, atol=2e-6)
