"""The tool ``calc_score``, which tells the policy whether a submitted answer is right.

A call is ``<tool_call>{"name": "calc_score", "arguments": {"answer": "12"}}</tool_call>``.  Only the last call of a
turn is answered.  A turn without a call is the final answer.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from typing import Any

from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv
from slime.rollout.rm_hub import grade_answer_verl
from slime.utils.types import Sample

TOOL = "calc_score"
_CALL, _CALL_END = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL), "</tool_call>"


class Geo3kEnv(BaseInteractionEnv):
    """Compares submitted answers with a sample's label."""

    def __init__(self, label: str) -> None:
        self.label = label

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Answer the last call of a turn."""
        # Stop at the last closing tag: unclosed tags after it would make the search quadratic.
        calls = _CALL.findall(response_text, 0, response_text.rfind(_CALL_END) + len(_CALL_END))
        if not calls:
            return {}, True, {}
        try:
            call = json.loads(calls[-1])
            name, answer = call["name"], str(call["arguments"]["answer"])
        except (ValueError, KeyError, TypeError):
            said = f'a call is {{"name": "{TOOL}", "arguments": {{"answer": "..."}}}}'
        else:
            if name != TOOL:
                said = f"there is no tool {name}, only {TOOL}"
            else:
                is_right = grade_answer_verl(f"\\boxed{{{answer}}}", self.label)
                said = "score 1: give this answer in \\boxed{}" if is_right else "score 0: look again"
        return {"obs_str": said, "role": "tool"}, False, {}


def build_env(sample: Sample, args: Namespace) -> Geo3kEnv:
    """Return the environment of a sample."""
    return Geo3kEnv(str(sample.label))
