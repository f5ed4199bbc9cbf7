"""Bugs in the trainer's input: groups, masks, rewards, continued responses, teachers, weight versions."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

REWARDS = "tests/unit/train_data/test_rewards.py"
CONVERT = "tests/unit/train_data/test_convert.py"
ROLLOUT = "tests/unit/rollout/"

DATA = (
    Mutation(
        bug="group statistics over the wrong axis: samples of different prompts compared",
        target="slime.train_data.rewards:_identified",
        old="position // n_samples_per_prompt for position",
        new="position % rollout_batch_size for position",
        tests=(f"{REWARDS}::test_without_group_ids_neighbours_are_a_group_when_the_count_fits",),
    ),
    Mutation(
        bug="all samples of a rollout are one group",
        target="slime.train_data.rewards:_identified",
        old="    if nameless == 0:\n        return named\n",
        new="    if nameless == 0:\n        return [0] * num_samples\n",
        tests=(f"{REWARDS}::test_groups_are_told_by_their_ids_wherever_their_samples_stand",),
        cells=(("dp2", "grpo"),),
    ),
    Mutation(
        bug="a rollout counts in its group once for each of its samples",
        target="slime.train_data.rewards:post_process_rewards",
        old="if rollout_id is None else",
        new="if True else",
        tests=(f"{REWARDS}::test_a_rollout_counts_once_however_many_samples_it_was_cut_into",),
    ),
    Mutation(
        bug="group deviation without Bessel's correction",
        target="slime.algorithms.group_baselines:group_mean_and_std",
        old="reward_G.std()",
        new="reward_G.std(correction=0)",
        tests=(f"{REWARDS}::test_group_is_centred_and_divided_by_its_unbiased_deviation",),
        cells=(("dp2", "not_whitened"),),
    ),
    Mutation(
        bug="rewards of a group not centred",
        target="slime.algorithms.group_baselines:group_mean",
        old="reward_G.mean().expand_as(reward_G)",
        new="torch.zeros_like(reward_G)",
        tests=(f"{REWARDS}::test_without_deviation_the_group_is_only_centred",),
    ),
    Mutation(
        bug="RLOO's baseline has the reward itself in it",
        target="examples.custom_estimator.rloo:leave_one_out",
        old="(reward_G.sum() - reward_G) / others",
        new="reward_G.mean().expand_as(reward_G)",
        cells=(("dp2", "rloo"),),
    ),
    Mutation(
        bug="rewards paired with the wrong samples when ranks share the batch",
        target="slime.train_data.split:split_by_rank",
        old="[values[position] for position in partition]",
        new='[values[k if name == "rewards" else position] for k, position in enumerate(partition)]',
        tests=(f"{CONVERT}::test_each_rank_gets_its_samples_in_micro_batch_order",),
        cells=(("dp2", "not_whitened"),),
    ),
    Mutation(
        bug="rewards of a group paired with the wrong samples",
        target="slime.rollout.sglang_rollout:_set_rewards",
        old="zip(samples, rewards, strict=True)",
        new="zip(samples, reversed(rewards), strict=True)",
        tests=(f"{ROLLOUT}test_sglang_rollout.py::test_group_rm_grades_each_group_once_after_all_its_samples",),
    ),
    Mutation(
        bug="steps cut by samples: a fanned-out rollout split over two of them",
        target="slime.train_data.schedule:_samples_by_step",
        old="positions_of_rollout.setdefault(rollout, []).append(position)",
        new="positions_of_rollout.setdefault(position, []).append(position)",
        tests=("tests/unit/train_data/test_schedule.py::test_schedule_matches_golden_vectors",),
    ),
    Mutation(
        bug="denominator of a sample instead of its rollout",
        target="slime.train_data.convert:rollout_mask_sums",
        old="return [totals[rollout_id] for rollout_id in rollout_ids]",
        new="return [int(sum(mask)) for mask in loss_masks]",
        tests=(f"{CONVERT}::test_siblings_of_a_rollout_share_their_mask_sum_and_strangers_get_unused_ids",),
        cells=(("dp2", "grpo"),),
    ),
    Mutation(
        bug="masks of removed samples lost: what a filter took out is trained",
        target="slime.train_data.convert:_loss_mask",
        old="if sample.remove_sample:",
        new="if False:",
        tests=(f"{CONVERT}::test_removed_sample_stays_in_the_batch_with_an_empty_mask",),
    ),
    Mutation(
        bug="what a tool wrote is trained",
        target="slime.utils.types:Sample._new_entries",
        old="[int(trainable)] * num_new",
        new="[1] * num_new",
        tests=("tests/unit/utils/test_types.py::test_tool_tokens_get_mask_zero_and_log_prob_zero",),
    ),
    Mutation(
        bug="log-probs of a continued response begin anew",
        target="slime.utils.types:Sample._new_entries",
        old="(_as_list(earlier_log_probs), new_log_probs)",
        new="(new_log_probs, _as_list(earlier_log_probs))",
        tests=("tests/unit/utils/test_types.py::test_tool_tokens_get_mask_zero_and_log_prob_zero",),
    ),
    Mutation(
        bug="continuation token budget wrong after a partial rollout",
        target="slime.rollout.engine_request:request_payload",
        old='params["max_new_tokens"] -= sample.response_length',
        new="pass",
        tests=(
            f"{ROLLOUT}test_sglang_rollout.py::test_the_next_rollout_continues_a_partial_response_where_it_stopped",
        ),
    ),
    Mutation(
        bug="continuation sent without the tokens drawn before",
        target="slime.rollout.engine_request:_prepare_prompt_ids",
        old="return list(sample.tokens)",
        new="return list(sample.tokens[: len(sample.tokens) - sample.response_length])",
        tests=(
            f"{ROLLOUT}test_sglang_rollout.py::test_the_next_rollout_continues_a_partial_response_where_it_stopped",
        ),
    ),
    Mutation(
        bug="tokens of older weights not masked where that was asked for",
        target="slime.rollout.sglang_rollout:mask_earlier_tokens",
        old="[0] * sample.response_length",
        new="[1] * sample.response_length",
        tests=(
            f"{ROLLOUT}test_sglang_rollout.py::"
            "test_the_next_rollout_continues_a_partial_response_where_it_stopped[True-mask1]",
        ),
    ),
    Mutation(
        bug="teacher scored at temperature 0",
        target="slime.ext.distill.engine_teacher:reward_func",
        old='"temperature": args.rollout_temperature',
        new='"temperature": 0.0',
        tests=("tests/ext/distill/test_engine_teacher.py::test_the_teacher_reads_the_whole_sample_and_draws_nothing",),
    ),
    Mutation(
        bug="the teacher's log-probs shifted by one token",
        target="slime.ext.distill.engine_teacher:teacher_log_probs",
        old="return [float(entry[0]) for entry in tail]",
        new="return [0.0, *(float(entry[0]) for entry in tail)][: len(tail)]",
        tests=("tests/ext/distill/test_engine_teacher.py::test_the_log_probs_of_the_response_become_the_teachers",),
    ),
    Mutation(
        bug="weight version off by one: staleness counted too low",
        target="slime.rollout.staleness:VersionClock.trained_at",
        old="self._offset + rollout_id // self._interval",
        new="self._offset + rollout_id // self._interval - 1",
        tests=(
            f"{ROLLOUT}test_staleness.py::"
            "test_the_clock_knows_what_the_trainer_will_hold_in_a_loop_that_generates_ahead",
        ),
    ),
    Mutation(
        bug="the newest version of a sample counts, not the oldest",
        target="slime.rollout.staleness:oldest_version",
        old="return min(numbers, default=None)",
        new="return max(numbers, default=None)",
        tests=(f"{ROLLOUT}test_staleness.py::test_the_oldest_version_is_that_of_a_trained_token",),
    ),
    Mutation(
        bug="MIS: the geometric ratio not divided by the length",
        target="examples.train_infer_mismatch_helper.formulas:ratio_at",
        old="exponent / mask_R.sum().clamp(min=1)",
        new="exponent",
        tests=("tests/oracle/test_mismatch.py::test_weights_masks_and_metrics[0]",),
        cells=(("cp2", "mis_geometric"),),
    ),
    Mutation(
        bug="MIS: tokens that are not trained in the ratio of their sequence",
        target="examples.train_infer_mismatch_helper.formulas:mismatch_importance_sampling",
        old="torch.where(is_trained_R, x.to(dtype), 0.0)",
        new="x.to(dtype)",
        tests=(
            "tests/unit/examples/test_mis_formulas.py::test_what_stands_where_a_token_is_not_trained_does_not_matter",
        ),
    ),
    Mutation(
        bug="MIS: sequence ratios from the tokens of this context-parallel rank",
        target="examples.train_infer_mismatch_helper.mis:compute_mis_weights_with_cp",
        old="all_gather_with_cp(values.detach(), *length)",
        new="torch.nn.functional.pad(values.detach(), (0, length[1] - len(values)))",
        cells=(("cp2", "mis_sequence"), ("cp2", "mis_rejection_geometric")),
    ),
    Mutation(
        bug="MIS: rejected tokens in the mean that normalises the weights",
        target="examples.train_infer_mismatch_helper.formulas:mismatch_importance_sampling",
        old="mean_weight(weight_N, new_mask_N,",
        new="mean_weight(weight_N, mask_N,",
        tests=("tests/oracle/test_mismatch.py::test_weights_masks_and_metrics[0]",),
    ),
)
