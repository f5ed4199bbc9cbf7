"""The calculator of examples/, alone and as the policy's tool."""

from __future__ import annotations

import asyncio
import json

import pytest

from examples.calculator import calculate
from slime.ext.environments.multi_turn import generate
from slime.utils.types import Sample

CALL = {"name": "calculate", "arguments": {"expression": "3 * (4 + 5) - -1"}}
TURN = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"


def test_it_computes_and_nothing_else():
    assert calculate("3 * (4 + 5) - -1") == 28
    assert calculate("7 / 2") == 3.5
    for text in ("2 ** 99", "open('x')", "'a' * 3", "x"):
        with pytest.raises(ValueError, match="only numbers"):
            calculate(text)


def test_a_policy_calls_it_and_reads_the_result(talk, ask):
    def policy(prompt):
        return "It is 28." if "<|im_start|>tool\n28<|im_end|>" in prompt else TURN

    args, _ = talk(policy, rollout_tools=["examples.calculator.calculate"])
    sample = asyncio.run(generate(args, ask("?"), {"max_new_tokens": 400}))
    assert sample.status is Sample.Status.COMPLETED and sample.metadata["round_number"] == 2
    assert sample.response.endswith("It is 28.<|im_end|>")
