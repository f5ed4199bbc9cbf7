"""Bugs of rewards, advantages and whitening."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

UNIT = "tests/unit/algorithms/test_advantages.py"
ORACLE = "tests/oracle/test_advantages.py"

ADVANTAGES = (
    Mutation(
        bug="whitening misses the context-parallel ranks",
        target="slime.backends.megatron_utils.advantages:compute_advantages_and_returns",
        old="get_data_parallel_group(with_context_parallel=True)",
        new="get_data_parallel_group()",
        cells=(("cp2", "grpo"), ("dp2_cp2", "ppo")),
    ),
    Mutation(
        bug="whitening on each rank by itself",
        target="slime.algorithms.advantages.whitening:whiten",
        old="if group is not None:",
        new="if False:",
        cells=(("dp2", "grpo"), ("cp2", "ppo")),
    ),
    Mutation(
        bug="whitening counts masked tokens",
        target="slime.algorithms.advantages.whitening:whiten",
        old="values[mask.to(values.device) != 0]",
        new="values",
        tests=(f"{UNIT}::test_whitening_counts_trained_tokens_only_and_moves_all", f"{ORACLE}::test_whitening[0]"),
    ),
    Mutation(
        bug="whitening by the biased variance",
        target="slime.algorithms.advantages.whitening:whiten",
        old="variance *= count / (count - 1)",
        new="pass",
        tests=(f"{ORACLE}::test_whitening[0]",),
    ),
    Mutation(
        bug="Bessel's correction upside down",
        target="slime.algorithms.advantages.whitening:whiten",
        old="count / (count - 1)",
        new="(count - 1) / count",
        tests=(f"{ORACLE}::test_whitening[0]",),
    ),
    Mutation(
        bug="whitening multiplies the deviation",
        target="slime.algorithms.advantages.whitening:whiten",
        old="** -0.5",
        new="** 0.5",
        tests=(f"{ORACLE}::test_whitening[0]",),
    ),
    Mutation(
        bug="GAE bootstraps a value beyond the end",
        target="slime.algorithms.gae:generalised_advantages",
        old="values_R.new_zeros(min(len(values_R), 1))",
        new="values_R[-1:]",
        tests=(f"{UNIT}::test_gae_matches_golden_values",),
        cells=(("dp2", "ppo"),),
    ),
    Mutation(
        bug="GAE without gamma in its recursion",
        target="slime.algorithms.gae:generalised_advantages",
        old="ragged_discounted_sums(deltas_N, gamma * lambd)",
        new="ragged_discounted_sums(deltas_N, lambd)",
        tests=(f"{ORACLE}::test_estimators[ppo-0]",),
    ),
    Mutation(
        bug="returns without the values: the critic regresses on advantages",
        target="slime.algorithms.gae:generalised_advantages",
        old="advantages_R + values_R",
        new="advantages_R",
        tests=(f"{UNIT}::test_gae_matches_golden_values",),
        cells=(("cp2", "critic"),),
    ),
    Mutation(
        bug="PPO's reward on the wrong token: the first one",
        target="slime.algorithms.advantages.inputs:token_rewards",
        old="rewards_R[-1:]",
        new="rewards_R[:1]",
        tests=(f"{UNIT}::test_ppo_rewards_the_last_token_of_the_response",),
    ),
    Mutation(
        bug="PPO's reward on the last token of each context-parallel rank",
        target="slime.backends.megatron_utils.advantages:_estimate",
        old="estimator.needs_whole_responses and mpu.get_context_parallel_world_size() > 1",
        new="False",
        cells=(("cp2", "ppo"), ("cp2", "reinforce")),
    ),
    Mutation(
        bug="PPO's KL penalty with the wrong sign",
        target="slime.algorithms.advantages.inputs:token_rewards",
        old="-config.kl_coef * kl_R",
        new="config.kl_coef * kl_R",
        tests=(f"{ORACLE}::test_estimators[ppo-0]",),
    ),
    Mutation(
        bug="masked tokens are steps of time",
        target="slime.algorithms.advantages.inputs:_is_trained",
        old="mask.to(like.device) != 0",
        new="mask.to(like.device) >= 0",
        tests=(
            f"{UNIT}::test_reinforce_plus_plus_discounts_from_the_last_trained_token",
            f"{ORACLE}::test_estimators[ppo-0]",
        ),
        cells=(("cp2", "reinforce"), ("dp2_cp2", "ppo")),
    ),
    Mutation(
        bug="REINFORCE++ without its discount",
        target="slime.algorithms.advantages.reinforce_plus_plus:reinforce_plus_plus_advantages",
        old="config.gamma",
        new="1.0",
        tests=(f"{UNIT}::test_reinforce_plus_plus_discounts_from_the_last_trained_token",),
    ),
    Mutation(
        bug="the baseline's KL is a reward",
        target=("slime.algorithms.advantages.reinforce_plus_plus_baseline:reinforce_plus_plus_baseline_advantages"),
        old="float(reward) - config.kl_coef",
        new="float(reward) + config.kl_coef",
        tests=(f"{UNIT}::test_baseline_takes_the_penalty_off_every_token",),
    ),
    Mutation(
        bug="distillation pushes away from the teacher",
        target="slime.ext.distill.guide:add_distillation",
        old="advantages_R - coef * reverse_kl_R",
        new="advantages_R + coef * reverse_kl_R",
        tests=("tests/ext/distill/test_guide.py::test_distillation_pulls_towards_the_teacher",),
        cells=(("dp2", "distilled"),),
    ),
    Mutation(
        bug="discounted sums run forward",
        target="slime.algorithms.discounted:discounted_suffix_sums",
        old="ahead_BL = sums_BL[..., span:].clone()\n        sums_BL[..., :-span] += weight * ahead_BL",
        new="behind_BL = sums_BL[..., :-span].clone()\n        sums_BL[..., span:] += weight * behind_BL",
        tests=(f"{UNIT}::test_scan_equals_the_sequential_sum[0.9-3]",),
    ),
)
