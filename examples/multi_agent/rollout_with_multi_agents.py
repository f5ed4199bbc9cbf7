"""Solvers and a judge: several roles of one policy answer a prompt, and each role's answer is a sample.

    --custom-generate-function-path examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents
    --custom-reward-post-process-path examples.multi_agent.rollout_with_multi_agents.normalize_by_role

One execution of a prompt runs the solvers in parallel, shows their answers to the judge, and returns all samples.
They share a ``rollout_id``, so the loss counts them as one execution.  Prompts must be plain text (leave
``--apply-chat-template`` off), because each role wraps the prompt in its own message.

Settings, by ``--custom-config-path``: ``multi_agent_solvers``, ``multi_agent_judge_prompt`` (with ``{question}`` and
``{answers}``), ``multi_agent_judge_max_tokens``, ``multi_agent_final_share``.
"""

from __future__ import annotations

import asyncio
import copy
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from examples.tiny_arithmetic.reward import grade
from slime.rollout.prompts import render
from slime.rollout.rm_hub import extract_boxed_answer
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.utils.types import Sample

NUM_SOLVERS = 3
JUDGE_PROMPT = "{question} answers {answers}"
FINAL_SHARE = 0.2
"""Weight of the judge's reward in a solver's reward, which rewards helping the team."""
UNREADABLE = "?"
STD_EPSILON = 1e-6


async def generate_with_multi_agents(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Return the samples of all roles with their rewards; in an evaluation, only the judge's.

    If a role is interrupted, the samples are returned without rewards, and the rollout runs this prompt again.
    """
    team = Team(args, sample, sampling_params)
    solutions = await asyncio.gather(*(team.solve(number) for number in range(team.num_solvers)))
    if any(one.status is Sample.Status.ABORTED for one in solutions):
        return _interrupted(sample) if evaluation else list(solutions)
    verdict = await team.judge(solutions)
    if verdict.status is Sample.Status.ABORTED:
        return _interrupted(sample) if evaluation else [*solutions, verdict]
    verdict.reward = grade(verdict)
    if evaluation:
        return verdict
    for one in solutions:
        one.reward = (1 - team.final_share) * grade(one) + team.final_share * verdict.reward
    return [*solutions, verdict]


def _interrupted(sample: Sample) -> Sample:
    sample.status = Sample.Status.ABORTED
    return sample


class Team:
    """The roles around one question."""

    def __init__(self, args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> None:
        # A private copy: attributes set on it are visible only to this team's roles.
        self.args = copy.deepcopy(args)
        self.args.sampling_params = dict(sampling_params)
        self.args.tokenizer = GenerateState(args).tokenizer
        self.num_solvers = int(getattr(args, "multi_agent_solvers", NUM_SOLVERS))
        self.final_share = float(getattr(args, "multi_agent_final_share", FINAL_SHARE))
        self.sample = sample

    async def solve(self, number: int) -> Sample:
        """Return one solver's answer to the question."""
        return await self._speak("solver", number, str(self.sample.prompt), {})

    async def judge(self, solutions: Sequence[Sample]) -> Sample:
        """Return the judge's answer, given those of the solvers."""
        answers = " ".join(answer_of(one) for one in solutions)
        template = getattr(self.args, "multi_agent_judge_prompt", JUDGE_PROMPT)
        limit = getattr(self.args, "multi_agent_judge_max_tokens", None)
        params = {} if limit is None else {"max_new_tokens": int(limit)}
        return await self._speak("judge", 0, template.format(question=self.sample.prompt, answers=answers), params)

    async def _speak(self, role: str, number: int, message: str, params: dict[str, Any]) -> Sample:
        """Have the policy answer as this role, in a separate sample."""
        one = copy.deepcopy(self.sample)
        one.rollout_id = self.sample.index if self.sample.rollout_id is None else self.sample.rollout_id
        one.metadata |= {"role": role, "number": number}
        asked, kwargs = [{"role": "user", "content": message}], one.apply_chat_template_kwargs
        one.prompt = render(self.args.tokenizer, asked, None, f"Sample {one.index}", **kwargs)
        one.tokens, one.response, one.response_length = [], "", 0
        one.status = Sample.Status.PENDING
        own = self.args.sampling_params | params
        if (
            "sampling_seed" in own
        ):  # deterministic inference: with the same seed, all solvers would give the same answer
            own["sampling_seed"] += 1000 * (number + 1)
        return await generate(self.args, one, own)


def answer_of(solution: Sample) -> str:
    """Return the part of a solution that is shown to the judge."""
    return extract_boxed_answer(solution.response) or UNREADABLE


def normalize_by_role(args: Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """``--custom-reward-post-process-path``: normalize rewards over samples with the same role and prompt.

    Solvers are compared with solvers, and judges with judges.  By default, each team would count once in its prompt's
    group, with the mean reward of its members.
    """
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    members: dict[tuple[int | None, str], list[int]] = defaultdict(list)
    for position, sample in enumerate(samples):
        members[sample.group_index, sample.metadata.get("role", "")].append(position)
    normalized = [0.0] * len(raw)
    for positions in members.values():
        rewards = torch.tensor([raw[position] for position in positions], dtype=torch.float64)
        centred = rewards - rewards.mean()
        if args.grpo_std_normalization and len(positions) > 1:
            centred = centred / (rewards.std() + STD_EPSILON)
        for position, value in zip(positions, centred.tolist(), strict=True):
            normalized[position] = value
    return raw, normalized
