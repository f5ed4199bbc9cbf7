"""Rewards: of one sample, of one group, and their normalization before training."""

import asyncio

from slime.rollout.rm_hub import extract_boxed_answer, grade_answer_verl


def grade(args, sample):
    answer = extract_boxed_answer(sample.response)
    right = answer is not None and grade_answer_verl(sample.response, str(sample.label))
    calls = sample.metadata.get("calls", 0)
    score = (1.0 if right else 0.0) + getattr(args, "calc_tool_reward", 0.0) * calls
    return {"score": score, "acc": float(right), "pred": answer}


async def custom_rm(args, sample, **kwargs):
    """A dict, so it goes with --reward-key score. Accepts a list as well: fan-out hands one over."""
    if isinstance(sample, list):
        return list(await asyncio.gather(*(custom_rm(args, one, **kwargs) for one in sample)))
    await asyncio.sleep(0)
    return grade(args, sample)


async def group_rm(args, samples, **kwargs):
    """With --group-rm: the shortest right answer of the group gets a bonus."""
    scores = [grade(args, sample)["score"] for sample in samples]
    right = [i for i, score in enumerate(scores) if score >= 1.0]
    if right:
        scores[min(right, key=lambda i: samples[i].response_length)] += 0.5
    return scores


def post_process(args, samples):
    """(raw, normalized): each group's mean is subtracted; no division."""
    raw = [sample.get_reward_value(args) for sample in samples]
    groups = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group_index, []).append(i)
    rewards = [0.0] * len(samples)
    for members in groups.values():
        mean = sum(raw[i] for i in members) / len(members)
        for i in members:
            rewards[i] = raw[i] - mean
    return raw, rewards
