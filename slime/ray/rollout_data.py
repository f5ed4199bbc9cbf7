"""Converts the groups returned by a rollout function into batches for the trainer ranks.

Hooks may replace reward normalization or the whole conversion; their results are checked against the same columns.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

from slime.backends.megatron_utils.flags.model_dims import schedule_config
from slime.flags.reward import RewardConfig
from slime.train_data.columns import RankBatch, TrainBatch
from slime.train_data.convert import check_columns, is_finite, named_entry, samples_to_train_data
from slime.train_data.rewards import post_process_rewards
from slime.train_data.routed_experts import RoutedShape
from slime.train_data.schedule import build_dp_schedule
from slime.train_data.split import split_by_rank
from slime.utils.errors import DataError, HookError
from slime.utils.misc import call_hook
from slime.utils.types import Sample


def check_fan_out(groups: Iterable[Any], *, depth: int = 0) -> None:
    """Check that samples from one execution of a prompt share a rollout id.

    Raises:
        HookError: a list at depth two or deeper holds several samples without a common, non-None ``rollout_id``.
    """
    for item in groups:
        if isinstance(item, Sample):
            continue
        leaves = [leaf for leaf in item if isinstance(leaf, Sample)]
        if depth >= 1 and len(leaves) > 1:
            ids = {leaf.rollout_id for leaf in leaves}
            if len(ids) != 1 or None in ids:
                raise HookError(
                    f"a custom generate function returned {len(leaves)} samples for one execution with rollout ids "
                    f"{sorted(map(str, ids))}; set the same sample.rollout_id on all of them, or the loss would count "
                    "the prompt several times"
                )
        check_fan_out(item, depth=depth + 1)


def _converted_by_plug_in(path: str, data: Any, samples: list[Sample]) -> TrainBatch:
    """Return the batch of what a converter returned."""
    if isinstance(data, dict) and "tokens" in data and all(sample.rollout_id is None for sample in samples):
        data = {"rollout_ids": list(range(len(data["tokens"])))} | data
    needed = TrainBatch.required()
    missing = [name for name in needed if not isinstance(data, dict) or name not in data]
    if missing:
        returned = f"a dict without {', '.join(missing)}" if isinstance(data, dict) else type(data).__name__
        raise HookError(
            f"--custom-convert-samples-to-train-data-path {path} returned {returned}; it must return a dict of "
            f"columns (slime/train_data/columns.py), {', '.join(needed)} among them."
        )
    return TrainBatch.from_dict(data)


def _rewards_of_plug_in(path: str, result: Any, num_samples: int) -> tuple[Any, Any]:
    """Return the raw rewards and those to train on, of what a post-process function returned."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise HookError(
            f"--custom-reward-post-process-path {path} returned {type(result).__name__}; it must return two lists, "
            "the raw rewards and those to train on, with an entry for each sample."
        )
    for name, values in zip(("raw rewards", "rewards to train on"), result, strict=True):
        is_list = hasattr(values, "__len__") and not isinstance(values, str | bytes | Mapping | set)
        count = len(values) if is_list else type(values).__name__
        if count != num_samples:
            raise HookError(
                f"--custom-reward-post-process-path {path} returned {count} {name} for {num_samples} samples; there "
                "must be one for each sample."
            )
    return result[0], result[1]


def _raw_rewards(config: RewardConfig, samples: list[Sample]) -> list[Any]:
    """Return each sample's reward, or entry ``--reward-key`` of a dict reward; 0 for ungraded samples.

    Raises:
        DataError: a reward is not a finite number, or lacks the entry.
    """
    rewards, key = [], config.reward_key
    for sample in samples:
        reward: Any = sample.reward if sample.is_graded else 0.0
        if key and isinstance(reward, Mapping):
            reward = reward.get(key)
        is_number = isinstance(reward, Real) and is_finite(reward)
        is_other = key and sample.is_graded and not isinstance(sample.reward, Mapping)
        if not is_number or is_other:
            path = config.custom_rm_path if sample.custom_rm_path is None else sample.custom_rm_path
            rm_type = (sample.metadata or {}).get("rm_type") or config.rm_type
            given = f"--custom-rm-path {path}" if path else f"--rm-type {rm_type}"
            wanted = f"an object whose entry {key!r} (--reward-key) is a" if key else "a"
            kind = type(sample.reward).__name__
            raise DataError(
                f"the reward of sample {sample.index} by {given} (or the generate function) is "
                f"{str(sample.reward)[:200]!r} ({kind}); it must be {wanted} finite number; a dict needs "
                "--reward-key, a function of --custom-rm-path must return an int or a float"
            )
        rewards.append(reward)
    return rewards


def train_data_from_samples(args: Namespace, samples: list[Sample]) -> TrainBatch:
    """Return a rollout's train data, converted by slime or by the custom converter."""
    if path := args.custom_convert_samples_to_train_data_path:
        data = call_hook("--custom-convert-samples-to-train-data-path", path, args, samples)
        batch = _converted_by_plug_in(path, data, samples)
        check_columns(batch, {column: (allowed, flag) for column, (_, allowed, flag) in args.named_columns.items()})
        return batch
    if path := args.custom_reward_post_process_path:
        result = call_hook("--custom-reward-post-process-path", path, args, samples)
        raw_rewards, rewards = _rewards_of_plug_in(path, result, len(samples))
    else:
        raw_rewards = _raw_rewards(RewardConfig.of(args), samples)
        rewards = post_process_rewards(
            raw_rewards,
            n_samples_per_prompt=args.n_samples_per_prompt,
            rollout_batch_size=args.rollout_batch_size,
            advantage_estimator=args.advantage_estimator,
            rewards_normalization=args.rewards_normalization,
            grpo_std_normalization=args.grpo_std_normalization,
            group_ids=[sample.group_index for sample in samples],
            rollout_ids=[sample.rollout_id for sample in samples],
            graded=[sample.is_graded for sample in samples],
        )
    routed = None
    if args.use_rollout_routing_replay:
        routed = RoutedShape(num_layers=args.num_layers, top_k=args.moe_router_topk, num_experts=args.num_experts)
    named = {
        column: [named_entry(sample, *entry) for sample in samples] for column, entry in args.named_columns.items()
    }
    with _plug_ins_named(plug_ins_of_samples(args)):
        return samples_to_train_data(
            samples, raw_rewards, rewards, rollout_top_p=args.rollout_top_p, routed=routed, extra=named
        )


def split_for_ranks(args: Namespace, batch: TrainBatch, parallel: Mapping[str, int]) -> list[RankBatch]:
    """Return each data-parallel rank's share of the rollout."""
    schedule = build_dp_schedule(
        schedule_config(args, parallel),
        [len(tokens) for tokens in batch.tokens],
        global_batch_size=args.global_batch_size,
        rollout_indices=batch.rollout_ids,
    )
    with _plug_ins_named(plug_ins_of_samples(args)):
        return split_by_rank(batch, schedule)


@contextmanager
def _plug_ins_named(plug_ins: str) -> Iterator[None]:
    """Add to a DataError the plug-ins that may have set the bad value."""
    try:
        yield
    except DataError as error:
        if plug_ins:
            raise DataError(f"{error}. A plug-in may have set it: {plug_ins}") from error
        raise


def plug_ins_of_samples(args: Namespace) -> str:
    """Return, as text, the run's plug-ins that make or change samples and columns, with their flags."""
    paths = {
        "--rollout-function-path": args.rollout_function_path,
        "--custom-generate-function-path": args.custom_generate_function_path,
        "--rollout-sample-hook-path": args.rollout_sample_hook_path,
        "--rollout-sample-filter-path": args.rollout_sample_filter_path,
        "--custom-reward-post-process-path": args.custom_reward_post_process_path,
        "--custom-convert-samples-to-train-data-path": args.custom_convert_samples_to_train_data_path,
    }
    named = (
        (flag, path) for flag, value in paths.items() for path in ([value] if isinstance(value, str) else value or [])
    )
    return ", ".join(f"{flag} {path}" for flag, path in named if not path.startswith("slime."))
