"""Solvers and a judge: their prompts, the returned samples, and which rewards are compared."""

from __future__ import annotations

import asyncio
import re

import pytest

from examples.multi_agent import rollout_with_multi_agents as example
from slime.rollout.sglang_rollout import generate_and_rm, generate_and_rm_group
from slime.utils.types import Sample

PATH = "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents"
PARAMS = {"temperature": 1.0, "max_new_tokens": 60}
QUESTION = "1+1+1+1+1 mod 10"


def policy(prompt):
    answers = re.findall(r"answers (.*?)<", prompt)
    return f"\\boxed{{{max(answers[0].split(), key=answers[0].split().count)}}}" if answers else "\\boxed{5}"


def question(**fields):
    return Sample(**({"index": 7, "group_index": 2, "prompt": QUESTION, "label": "5"} | fields))


def test_one_execution_gives_the_samples_of_all_roles_with_their_rewards(talk):
    args, engine = talk(policy, custom_generate_function_path=PATH)
    samples = asyncio.run(generate_and_rm(args, question(), dict(PARAMS)))
    assert [(s.metadata["role"], s.metadata["number"]) for s in samples] == [
        ("solver", 0),
        ("solver", 1),
        ("solver", 2),
        ("judge", 0),
    ]
    assert {(s.rollout_id, s.index, s.group_index) for s in samples} == {(7, 7, 2)}
    assert [s.reward for s in samples] == [1.0] * 4
    assert all(f"user\n{QUESTION}<" in s.prompt for s in samples[:3])
    assert f"user\n{QUESTION} answers 5 5 5<" in samples[3].prompt
    for sample in samples:
        assert len(sample.rollout_log_probs) == sample.response_length == len(sample.loss_mask)
        assert sample.tokens and sample.status is Sample.Status.COMPLETED


@pytest.mark.parametrize(
    ("solver", "judge", "rewards"),
    [("5", "4", [0.8, 0.8, 0.8, 0.0]), ("4", "5", [0.2, 0.2, 0.2, 1.0]), ("x", "5", [0.2, 0.2, 0.2, 1.0])],
)
def test_a_solver_shares_in_the_judges_success(talk, solver, judge, rewards):
    args, engine = talk(lambda prompt: f"\\boxed{{{judge if 'answers' in prompt else solver}}}")
    samples = asyncio.run(example.generate_with_multi_agents(args, question(), dict(PARAMS)))
    assert [s.reward for s in samples] == pytest.approx(rewards)


def test_settings_change_the_team_and_args_stay_as_they_were(talk):
    args, engine = talk(
        policy,
        multi_agent_solvers=2,
        multi_agent_judge_prompt="Which? {answers}",
        multi_agent_judge_max_tokens=3,
    )
    before = dict(vars(args))
    params = dict(PARAMS)
    samples = asyncio.run(example.generate_with_multi_agents(args, question(), params))
    assert len(samples) == 3 and "user\nWhich? 5 5<" in samples[2].prompt
    assert [p["sampling_params"]["max_new_tokens"] for p in engine.payloads] == [60, 60, 3]
    assert vars(args) == before and params == PARAMS


def test_an_interrupted_team_begins_anew(talk, monkeypatch):
    args, engine = talk(policy, custom_generate_function_path=PATH)
    plain = example.generate

    async def interrupted(args, sample, params):
        await plain(args, sample, params)
        if sample.metadata["number"] == 1:
            sample.status = Sample.Status.ABORTED
        return sample

    monkeypatch.setattr(example, "generate", interrupted)
    (entry,) = asyncio.run(generate_and_rm_group(args, [question()], dict(PARAMS)))
    assert isinstance(entry, Sample) and entry.status is Sample.Status.ABORTED
    assert (entry.prompt, entry.tokens, entry.reward) == (QUESTION, [], None)
    monkeypatch.setattr(example, "generate", plain)
    (samples,) = asyncio.run(generate_and_rm_group(args, [entry], dict(PARAMS)))
    assert [s.reward for s in samples] == [1.0] * 4


def test_rewards_are_normalised_within_prompt_and_role(talk):
    rows = [(1, "solver", 1.0), (1, "solver", 0.0), (1, "judge", 1.0), (2, "solver", 1.0), (1, "judge", 0.0)]
    rows += [(1, "solver", 0.5), (2, "judge", 0.3)]
    samples = [Sample(group_index=g, metadata={"role": role}, reward=r) for g, role, r in rows]
    args, engine = talk(policy, grpo_std_normalization=False)
    raw, rewards = example.normalize_by_role(args, samples)
    assert raw == [1.0, 0.0, 1.0, 1.0, 0.0, 0.5, 0.3]
    assert rewards == pytest.approx([0.5, -0.5, 0.5, 0.0, -0.5, 0.0, 0.0])
    args.grpo_std_normalization = True
    _, rewards = example.normalize_by_role(args, samples)
    assert rewards == pytest.approx([1.0, -1.0, 0.7071, 0.0, -0.7071, 0.0, 0.0], abs=1e-4)
