"""The trainer's own loss function on real ranks (two data-parallel, two context-parallel, two vocabulary shards) and
in one process, against the reference: the same loss, metrics and gradient of every step, however it is packed.

Where ``test_split_invariance`` runs the pure pieces in one process, here parallel state, gathers and gradient
collectives are the trainer's, and only the model is a table of bigram logits.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.train_data.convert import samples_to_train_data
from slime.train_data.flops import FlopsModel
from slime.train_data.schedule import ScheduleConfig, build_dp_schedule
from slime.train_data.split import split_by_rank
from tests.dist.gloo_ranks import run_ranks
from tests.oracle.batches import VOCABULARY, as_samples, bigram_policy, random_examples
from tests.oracle.step import expected_steps, teacher_log_probs

COLUMNS = VOCABULARY + 1  # even, so that two shards are alike
ROLLOUTS_PER_STEP = 4
SEEDS = (3, 11)
LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {},
    "cp2": {"context_parallel_size": 2},
    "tp2": {"tensor_model_parallel_size": 2},
    "one": {},
}
"""The last one by each of the two processes alone."""
FLOPS = FlopsModel(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=4,
    ffn_hidden_size=16,
    vocab_size=VOCABULARY,
)
PACKINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 50},
    "balanced": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40, "balance_data": True, "flops": FLOPS},
    "flops": {
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 64,
        "balance_data": True,
        "balance_by_flops": True,
        "flops": FLOPS,
    },
    "static": {"micro_batch_size": 1},
}
PENALTY = {"kl_coef": 0.3, "use_kl_loss": False, "kl_loss_coef": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "per_token": {"calculate_per_token_loss": True},
    "gspo": {"advantage_estimator": "gspo"},
    "gspo_per_token": {"advantage_estimator": "gspo", "calculate_per_token_loss": True},
    "cispo": {"advantage_estimator": "cispo"},
    "ppo": {"advantage_estimator": "ppo", "gamma": 0.95, "lambd": 0.9, **PENALTY},
    "ppo_plain": {"advantage_estimator": "ppo", "normalize_advantages": False, **PENALTY},
    "reinforce": {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.95, **PENALTY},
    "baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", **PENALTY},
    "critic": {"advantage_estimator": "ppo", "loss_type": "value_loss", "normalize_advantages": False, **PENALTY},
    "sft": {"loss_type": "sft_loss"},
    "sft_per_token": {"loss_type": "sft_loss", "calculate_per_token_loss": True},
    "not_whitened": {"normalize_advantages": False},
    "dual_clip": {"eps_clip_c": 1.2},
    "unbiased_kl": {"use_unbiased_kl": True, "kl_loss_type": "low_var_kl"},
    "k2": {"kl_loss_type": "k2"},
    "tis": {"use_tis": True},
    "icepop": {
        "use_tis": True,
        "custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function",
    },
    "opsm": {"use_opsm": True},
    "opsm_per_token": {"use_opsm": True, "calculate_per_token_loss": True},
    "engine_log_probs": {"use_rollout_logprobs": True},
    "reused_log_probs": {"reuse_log_probs": True},
    "top_p": {"rollout_top_p": 0.9},
    "distilled": {"use_opd": True},
    "distilled_plain": {"use_opd": True, "normalize_advantages": False},
    "distilled_engine": {"use_opd": True, "use_rollout_logprobs": True, "normalize_advantages": False},
    "distilled_ppo": {"use_opd": True, "advantage_estimator": "ppo", "gamma": 0.95, "lambd": 0.9, **PENALTY},
    "recompute": {"recompute_loss_function": True},
    "no_chunks": {"log_probs_chunk_size": -1, "entropy_coef": 0.0},
}
CELLS = [
    *((variant, "dynamic") for variant in VARIANTS),
    *((variant, packing) for packing in ("balanced", "flops", "static") for variant in ("grpo", "per_token", "gspo")),
]


def arguments(variant: str) -> Namespace:
    defaults = {
        "vocab_size": VOCABULARY,
        "loss_type": "policy_loss",
        "allgather_cp": False,
        "advantage_estimator": "grpo",
        "calculate_per_token_loss": False,
        "recompute_loss_function": False,
        "rollout_temperature": 0.9,
        "rollout_top_p": 1.0,
        "log_probs_chunk_size": 4,
        "entropy_coef": 0.01,
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "eps_clip_c": None,
        "value_clip": 0.2,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "k3",
        "use_unbiased_kl": False,
        "use_rollout_logprobs": False,
        "reuse_log_probs": False,
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
        "opd_kl_coef": 0.7,
        "normalize_advantages": True,
    }
    return Namespace(**{**defaults, **VARIANTS[variant]})


def problem(args: Namespace, seed: int) -> tuple[list[Any], torch.Tensor]:
    """An even number of samples, and the table: logits with one column of vocabulary padding, or a value."""
    examples = random_examples(seed)
    if len(examples) % 2:
        examples = random_examples(seed + 1000)
    assert len(examples) % 2 == 0
    if args.loss_type == "value_loss":
        return examples, bigram_policy(seed)[:, :1]
    padding = torch.full((VOCABULARY, 1), 2.0, dtype=torch.float64)
    return examples, torch.cat([bigram_policy(seed), padding], dim=1)


def steps_of_this_rank(variant: str, packing: str, seed: int) -> list[dict[str, Any]]:
    """Metrics and gradient of each step, summed as Megatron sums them."""
    from megatron.core import mpu

    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
    from slime.backends.megatron_utils.data import DataIterator, get_batch, prepare_rollout_data
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns, loss_function
    from slime.backends.megatron_utils.train_metrics import reduce_step_metrics

    args = arguments(variant)
    dp_size, cp_size = mpu.get_data_parallel_world_size(), mpu.get_context_parallel_world_size()
    tp_rank, tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()

    examples, table = problem(args, seed)
    rewards = [example.reward for example in examples]
    train_data = samples_to_train_data(as_samples(examples), rewards, rewards, rollout_top_p=args.rollout_top_p)
    schedule = build_dp_schedule(
        ScheduleConfig(dp_size=dp_size, cp_size=cp_size, **PACKINGS[packing]),
        [len(tokens) for tokens in train_data["tokens"]],
        global_batch_size=ROLLOUTS_PER_STEP,
        rollout_indices=train_data["rollout_ids"],
    )
    data = prepare_rollout_data(split_by_rank(train_data, schedule)[mpu.get_data_parallel_rank()])
    picked = [examples[position] for position in data["partition"]]
    for name, field in (("log_probs", "old"), ("ref_log_probs", "reference"), ("values", "values")):
        data[name] = [
            slice_log_prob_with_cp(torch.tensor(getattr(e, field)), len(e.tokens), e.response_length) for e in picked
        ]
    data["teacher_log_probs"] = [
        slice_log_prob_with_cp(teacher_log_probs(e).float(), len(e.tokens), e.response_length) for e in picked
    ]
    compute_advantages_and_returns(args, data)
    if args.reuse_log_probs:
        del data["log_probs"]

    if args.loss_type != "value_loss":
        table = table[:, tp_rank * COLUMNS // tp_size : (tp_rank + 1) * COLUMNS // tp_size]
    iterator = DataIterator(data, data["micro_batch_indices"])
    keys = ["tokens", "total_lengths", "response_lengths", "loss_masks", "log_probs", "ref_log_probs", "advantages"]
    keys += ["returns", "values", "rollout_log_probs", "rollout_mask_sums"]
    if args.rollout_top_p != 1.0:
        keys += ["rollout_top_p_token_ids", "rollout_top_p_token_offsets"]
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    steps = []
    for num_microbatches, step_size in zip(schedule.num_microbatches, schedule.global_batch_sizes, strict=True):
        parameters = table.float().clone().requires_grad_()
        num_tokens = torch.zeros(())
        reports = []
        for _ in range(num_microbatches):
            batch = get_batch(iterator, keys, pad_multiplier=4)
            logits = parameters[batch["tokens"]]
            scaled, normaliser, report = loss_function(
                args, batch, num_microbatches, step_size, args.loss_type, logits
            )
            # as Megatron's schedule: divided by the micro-batches, or left for the division by the number of tokens
            (scaled if args.calculate_per_token_loss else scaled / num_microbatches).backward()
            num_tokens += normaliser
            reports.append(report)
        for tensor in (parameters.grad, num_tokens):
            dist.all_reduce(tensor, group=group)
        metrics = reduce_step_metrics(
            reports,
            step_global_batch_size=step_size,
            per_token=args.calculate_per_token_loss,
            cp_size=cp_size,
            group=group,
        )
        divisor = num_tokens if args.calculate_per_token_loss else dist.get_world_size(group)
        steps.append({"metrics": metrics, "grad": (parameters.grad / divisor).tolist()})
    return steps


def every_layout_of_this_rank() -> dict[tuple[str, str, str, int], list[dict[str, Any]]]:
    from slime.backends.megatron_utils import cpu_platform  # noqa: F401

    # isort: split
    from megatron.core import mpu

    torch.manual_seed(0)
    results = {}
    for layout, sizes in LAYOUTS.items():
        if layout == "one":
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mpu.initialize_model_parallel(**sizes)
        for variant, packing in CELLS:
            for seed in SEEDS:
                results[layout, variant, packing, seed] = steps_of_this_rank(variant, packing, seed)
        mpu.destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, str, str, int], list[dict[str, Any]]]]:
    """What both ranks computed; one start of two processes serves all tests here."""
    return run_ranks(every_layout_of_this_rank, 2)


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("variant", "packing"), CELLS)
def test_loss_metrics_and_gradient_of_every_step_are_those_of_the_reference(ranks, layout, variant, packing):
    args = arguments(variant)
    for seed in SEEDS:
        examples, table = problem(args, seed)
        expected = expected_steps(args, examples, table, ROLLOUTS_PER_STEP)
        found = [rank[layout, variant, packing, seed] for rank in ranks]
        assert len(found[0]) == len(expected) == 2
        for step, (metrics, gradient) in enumerate(expected):
            for rank in found:
                assert rank[step]["metrics"] == pytest.approx(metrics, rel=2e-5, abs=2e-6), (seed, step)
            gradients = [torch.tensor(rank[step]["grad"], dtype=torch.float64) for rank in found]
            is_sharded = layout == "tp2" and args.loss_type != "value_loss"
            actual = torch.cat(gradients, dim=1) if is_sharded else gradients[0]
            torch.testing.assert_close(actual, gradient, rtol=2e-4, atol=2e-6)
