"""However a batch is split into micro-batches and ranks, loss and gradient of each step equal the reference's.

Runs slime's own pieces in one process, rank after rank: convert, schedule, split, pack, log-probabilities of
the response windows, policy loss, reduction, scaling; Megatron's part (dividing by
micro-batches, averaging over ranks) is done by hand.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slime.algorithms.kl import approx_kl
from slime.algorithms.log_probs import vocab_parallel_log_probs
from slime.algorithms.policy_losses.cispo import cispo_loss
from slime.algorithms.policy_losses.gspo import sequence_log_ratio, spread_over_tokens
from slime.algorithms.policy_losses.ppo_clip import ClipConfig, clipped_policy_loss
from slime.algorithms.reduction import num_loss_tokens, scale_for_megatron, sum_of_sample_means
from slime.train_data.context_parallel import (
    CPRank,
    allgather_response_windows,
    place_response,
    response_windows,
    slice_response,
)
from slime.train_data.convert import samples_to_train_data
from slime.train_data.microbatch import PackingConfig, align_loss_masks, pack_thd, take_micro_batch
from slime.train_data.schedule import ScheduleConfig, build_dp_schedule
from slime.train_data.split import split_by_rank
from tests.oracle import reference
from tests.oracle.batches import as_samples, bigram_policy, random_examples

CLIP = ClipConfig(low=0.2, high=0.28)
KL_COEF, ENTROPY_COEF = 0.1, 0.01
GLOBAL_BATCH_SIZE = 4


@dataclass(frozen=True)
class Layout:
    """How the batch is split."""

    dp_size: int = 1
    cp_size: int = 1
    max_tokens: int | None = None
    micro_batch_size: int = 1
    vpp_group: int = 1
    pad_multiple: int = 1
    chunk_size: int = -1
    balance: bool = False
    by_flops: bool = False

    def schedule_config(self):
        flops = None
        if self.balance:
            from slime.train_data.model_dims import ModelDims

            flops = ModelDims(
                num_layers=1,
                hidden_size=8,
                num_attention_heads=2,
                num_query_groups=2,
                head_dim=4,
                ffn_hidden_size=16,
                vocab_size=11,
            )
        return ScheduleConfig(
            dp_size=self.dp_size,
            cp_size=self.cp_size,
            vpp_size=2 if self.vpp_group > 1 else 1,
            microbatch_group_size_per_vp_stage=self.vpp_group,
            use_dynamic_batch_size=self.max_tokens is not None,
            max_tokens_per_gpu=self.max_tokens,
            micro_batch_size=self.micro_batch_size,
            balance_data=self.balance,
            balance_by_flops=self.by_flops,
            flops=flops,
        )


LAYOUTS = [
    Layout(),
    Layout(max_tokens=40, pad_multiple=8, chunk_size=5),
    Layout(dp_size=2, max_tokens=64),
    Layout(dp_size=4, max_tokens=40, pad_multiple=4),
    Layout(dp_size=2, max_tokens=60, vpp_group=2),
    Layout(cp_size=2, max_tokens=40, pad_multiple=4),
    Layout(dp_size=2, cp_size=3, max_tokens=16, chunk_size=2),
    Layout(cp_size=4, max_tokens=64, balance=True, dp_size=2),
    Layout(cp_size=2, max_tokens=64, balance=True, dp_size=2, by_flops=True),
]


def random_layout(rng, num_samples):
    """A random split of a batch whose smallest step has ``num_samples`` samples."""
    dp_size = rng.choice([size for size in (1, 2, 3, 4) if size <= num_samples])
    is_static = rng.random() < 0.2 and dp_size == 1
    return Layout(
        dp_size=dp_size,
        cp_size=rng.choice([1, 1, 2, 3, 4]),
        max_tokens=None if is_static else rng.choice([60, 80, 200]),
        micro_batch_size=rng.choice([1, 2, 3]),
        vpp_group=rng.choice([1, 2]) if 2 * dp_size <= num_samples and not is_static else 1,
        pad_multiple=rng.choice([1, 4, 16]),
        chunk_size=rng.choice([-1, 1, 7]),
        balance=(balance := rng.random() < 0.5),
        by_flops=balance and not is_static and rng.random() < 0.5,
    )


def expected_steps(examples, theta, estimator, per_token):
    """[step] loss, gradient and mean metrics by the reference."""
    results = []
    losses_of = {"grpo": reference.ppo_losses, "gspo": reference.gspo_losses, "cispo": reference.cispo_losses}[
        estimator
    ]
    for step in range(2):
        ids = range(step * GLOBAL_BATCH_SIZE, (step + 1) * GLOBAL_BATCH_SIZE)
        chosen = [example for example in examples if example.rollout_id in ids]
        parameters = theta.clone().requires_grad_()
        token_losses = []
        kls, entropies = [], []
        for example in chosen:
            logits = parameters[torch.tensor(example.tokens)]
            log_prob = reference.response_log_probs(example, logits)
            kls.append(reference.kl(log_prob, reference.f64(example.reference), "k3"))
            entropies.append(reference.response_entropies(example, logits))
            losses = losses_of(example, log_prob, reference.reward_on_every_token(example), CLIP.low, CLIP.high)
            token_losses.append(losses + KL_COEF * kls[-1] - ENTROPY_COEF * entropies[-1])
        mean = reference.mean_over_tokens if per_token else reference.mean_over_rollouts
        loss = mean(token_losses, chosen)
        (loss + 0 * parameters.sum()).backward()  # a step may have nothing to train
        metrics = {"kl": mean(kls, chosen).item(), "entropy": mean(entropies, chosen).item()}
        results.append((loss.detach(), parameters.grad, metrics))
    return results


def columns(examples, rank):
    """The columns that the trainer adds to a rank's data before training: whole responses here, split per rank
    below."""
    picked = [examples[position] for position in rank["partition"]]
    rank["old"] = [torch.tensor(example.old) for example in picked]
    rank["reference"] = [torch.tensor(example.reference) for example in picked]
    return rank


def micro_batch_loss(batch, parameters, layout, estimator, per_token, metrics) -> list[Tensor]:
    """[context-parallel rank] reduced loss of one micro-batch; ranks communicate only where slime lets them.

    Reduced metrics are added to ``metrics``.
    """
    totals, responses = batch["total_lengths"], batch["response_lengths"]
    log_probs: list[list[Tensor]] = []
    entropies: list[Tensor] = []
    for cp_rank in range(layout.cp_size):
        packing = PackingConfig(CPRank(cp_rank, layout.cp_size), layout.pad_multiple)
        packed = pack_thd(batch["tokens"], packing)
        logits_TV = parameters[packed.tokens[0]]
        rows, targets, sizes = [], [], []
        for tokens, runs in zip(batch["tokens"], response_windows(totals, responses, packing.cp), strict=True):
            rows += [torch.arange(run.stream_start, run.stream_start + run.length) for run in runs]
            targets += [tokens[run.token_start : run.token_start + run.length] for run in runs]
            sizes.append(sum(run.length for run in runs))
        empty = torch.zeros(0, dtype=torch.int64)
        log_prob_T, entropy_T = vocab_parallel_log_probs(
            logits_TV[torch.cat([*rows, empty])],
            torch.cat([*targets, empty]),
            with_entropy=True,
            chunk_size=layout.chunk_size,
        )
        log_probs.append(list(log_prob_T.split(sizes)))
        entropies.append(entropy_T)

        masks = align_loss_masks(batch["loss_masks"], totals, responses, packing)
        assert masks.shape == packed.tokens.shape
        assert int(masks.sum()) == sum(
            int(slice_response(mask, total, response, packing.cp).sum())
            for mask, total, response in zip(batch["loss_masks"], totals, responses, strict=True)
        )

    losses = []
    for cp_rank in range(layout.cp_size):
        cp = CPRank(cp_rank, layout.cp_size)

        def local(values, cp=cp):
            return [slice_response(row, t, r, cp) for row, t, r in zip(values, totals, responses, strict=True)]

        log_prob_T = torch.cat(log_probs[cp_rank])
        old_T = torch.cat(local(batch["old"]))
        advantage_T = spread_over_tokens(torch.tensor(batch["rewards"]), [len(row) for row in log_probs[cp_rank]])
        if estimator == "gspo":
            whole = [
                gathered(log_probs, index, t, r) for index, (t, r) in enumerate(zip(totals, responses, strict=True))
            ]
            ratio_N = sequence_log_ratio(whole, batch["old"], batch["loss_masks"])
            log_ratio_T = spread_over_tokens(ratio_N, [len(row) for row in log_probs[cp_rank]])
        else:
            log_ratio_T = log_prob_T - old_T
        if estimator == "cispo":
            loss_T, _ = cispo_loss(log_ratio_T, log_prob_T, advantage_T, CLIP)
        else:
            loss_T, _ = clipped_policy_loss(log_ratio_T, advantage_T, CLIP)
        kl_T = approx_kl(log_prob_T, torch.cat(local(batch["reference"])), "k3")
        loss_T = loss_T + KL_COEF * kl_T - ENTROPY_COEF * entropies[cp_rank]
        reduce = sum_of_sample_means(local(batch["loss_masks"]), batch["rollout_mask_sums"], per_token=per_token)
        losses.append(reduce(loss_T))
        metrics["kl"] += reduce(kl_T).item()
        metrics["entropy"] += reduce(entropies[cp_rank]).item()
    return losses


def gathered(log_probs, index, total, response):
    """The result of the differentiable all-reduce over context-parallel ranks."""
    return sum(
        place_response(pieces[index], total, response, CPRank(cp_rank, len(log_probs)))
        for cp_rank, pieces in enumerate(log_probs)
    )


def product_steps(examples, theta, layout, estimator, per_token):
    """[step] loss, gradient and mean metrics by slime."""
    samples = as_samples(examples)
    rewards = [example.reward for example in examples]
    train_data = samples_to_train_data(samples, rewards, rewards)
    schedule = build_dp_schedule(
        layout.schedule_config(),
        [len(sample.tokens) for sample in samples],
        global_batch_size=GLOBAL_BATCH_SIZE,
        rollout_indices=train_data.rollout_ids,
    )
    ranks = [columns(examples, rank.to_dict()) for rank in split_by_rank(train_data, schedule)]
    keys = ("tokens", "response_lengths", "total_lengths", "loss_masks", "rollout_mask_sums", "rewards")
    results = []
    first = 0
    for num_microbatches, step_size in zip(schedule.num_microbatches, schedule.global_batch_sizes, strict=True):
        parameters = theta.float().requires_grad_()
        total = torch.zeros(())
        num_tokens = torch.zeros(())
        metrics = {"kl": 0.0, "entropy": 0.0}
        for rank in ranks:
            for indices in rank["micro_batch_indices"][first : first + num_microbatches]:
                batch = take_micro_batch(rank, indices, (*keys, "old", "reference"))
                for loss in micro_batch_loss(batch, parameters, layout, estimator, per_token, metrics):
                    scaled = scale_for_megatron(
                        loss,
                        per_token=per_token,
                        num_microbatches=num_microbatches,
                        step_global_batch_size=step_size,
                        dp_size=layout.dp_size,
                        cp_size=layout.cp_size,
                    )
                    # Megatron: the mean over micro-batches and over ranks; or the sum over the number of tokens
                    total = total + (scaled if per_token else scaled / num_microbatches)
                    num_tokens = num_tokens + num_loss_tokens(batch["loss_masks"])
        total = total / num_tokens if per_token else total / (layout.dp_size * layout.cp_size)
        (total + 0 * parameters.sum()).backward()
        # like the trainer's metrics: over the rollouts of the step, or the tokens, which each context rank counts
        denominator = num_tokens.item() / layout.cp_size if per_token else step_size
        results.append((total.detach(), parameters.grad, {name: sums / denominator for name, sums in metrics.items()}))
        first += num_microbatches
    return results


def assert_steps_agree(examples, theta, layout, estimator, per_token):
    expected = expected_steps(examples, theta, estimator, per_token)
    actual = product_steps(examples, theta, layout, estimator, per_token)
    assert len(actual) == len(expected) == 2
    for (loss, gradient, metrics), (wanted_loss, wanted_gradient, wanted_metrics) in zip(
        actual, expected, strict=True
    ):
        torch.testing.assert_close(loss.double(), wanted_loss, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=2e-4, atol=2e-6)
        assert metrics == pytest.approx(wanted_metrics, rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("per_token", [False, True], ids=["per_rollout", "per_token"])
def test_any_split_gives_the_loss_and_gradient_of_the_reference(layout, estimator, per_token):
    for seed in range(3):
        examples = random_examples(seed)
        assert_steps_agree(examples, bigram_policy(seed), layout, estimator, per_token)


@pytest.mark.parametrize("seed", range(60))
def test_a_random_split_of_a_random_batch_gives_what_the_reference_gives(seed):
    rng = random.Random(seed)
    examples = random_examples(100 + seed)
    steps = [{example.rollout_id for example in examples} & set(range(s, s + 4)) for s in (0, 4)]
    smallest = min(sum(example.rollout_id in ids for example in examples) for ids in steps)
    layout = random_layout(rng, smallest)
    estimator, per_token = rng.choice(["grpo", "gspo", "cispo"]), rng.random() < 0.5
    assert_steps_agree(examples, bigram_policy(seed), layout, estimator, per_token)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_both_context_parallel_layouts_see_the_same_log_probs(cp_size):
    examples = random_examples(5)
    theta = bigram_policy(5)
    tokens = [torch.tensor(example.tokens) for example in examples]
    totals = [len(row) for row in tokens]
    responses = [example.response_length for example in examples]
    seen = {}
    for layout in ("zigzag", "allgather"):
        found = [torch.zeros(response, dtype=torch.float64) for response in responses]
        for cp_rank in range(cp_size):
            cp = CPRank(cp_rank, cp_size)
            packed = pack_thd(tokens, PackingConfig(cp, pad_multiple=2, layout=layout))
            logits_TV = theta[packed.tokens[0]]
            if layout == "zigzag":
                windows = response_windows(totals, responses, cp)
            else:
                windows = allgather_response_windows(totals, responses, cp, local_stream_length=packed.tokens.shape[1])
            for index, runs in enumerate(windows):
                for run in runs:
                    rows = logits_TV[run.stream_start : run.stream_start + run.length]
                    targets = tokens[index][run.token_start : run.token_start + run.length]
                    start = run.token_start - (totals[index] - responses[index])
                    found[index][start : start + run.length] += vocab_parallel_log_probs(rows, targets)[0]
        seen[layout] = found
    for example, zigzag, allgather in zip(examples, seen["zigzag"], seen["allgather"], strict=True):
        wanted = reference.response_log_probs(example, theta[torch.tensor(example.tokens)])
        torch.testing.assert_close(zigzag, wanted)
        torch.testing.assert_close(allgather, wanted)
