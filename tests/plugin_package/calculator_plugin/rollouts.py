"""Custom rollout and evaluation functions."""

import asyncio
import copy

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.types import Sample


async def _train(args, rollout_id, data_source):
    state = GenerateState(args)
    groups = data_source.get_samples(args.rollout_batch_size)
    done = await asyncio.gather(
        *(generate_and_rm_group(args, group, dict(state.sampling_params), evaluation=False) for group in groups)
    )
    return sorted(done, key=lambda group: group[0].index)


def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    """One wave, no over-sampling. Only for training calls; evaluation has a separate function."""
    assert not evaluation
    groups = run(_train(args, rollout_id, data_buffer))
    return RolloutFnTrainOutput(samples=groups, metrics={"calculator/groups": len(groups)})


def generate_rollout_legacy(args, rollout_id, data_source, evaluation=False):
    """The older form: a bare list of groups, or a bare dict for evaluation."""
    if evaluation:
        return {"sums": {"rewards": [1.0], "truncated": [False], "samples": [Sample(index=0, reward=1.0)]}}
    return run(_train(args, rollout_id, data_source))


async def _evaluate(args):
    state = GenerateState(args)
    params = {
        **state.sampling_params,
        "temperature": 0.0,
        "max_new_tokens": args.rollout_max_response_len,
    }
    samples = []
    for i in range(4):
        sample = Sample(index=i, group_index=i, prompt=f"{i} + {i} =", label=str(2 * i))
        samples.append(generate_and_rm(args, sample, copy.deepcopy(params), evaluation=True))
    return list(await asyncio.gather(*samples))


def eval_function(args, rollout_id, data_source, evaluation=False):
    """--eval-function-path: four sums, greedy."""
    assert evaluation
    samples = run(_evaluate(args))
    key = args.eval_reward_key or args.reward_key
    return RolloutFnEvalOutput(
        data={
            "sums": {
                "rewards": [sample.reward if not key else sample.reward[key] for sample in samples],
                "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
                "samples": samples,
            }
        },
        metrics={"calculator/evaluated": len(samples)},
    )
