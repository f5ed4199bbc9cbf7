"""An environment of the package ``verifiers``: products, with a multiplication tool.

    --prompt-data 'verifiers:examples.tiny_products?size=1024'

examples/run-tiny-verifiers.sh trains with it on two cores.
"""

from __future__ import annotations

import random
from argparse import Namespace
from typing import Any

from examples.multi_turn import multiply
from examples.tiny_tools.agents import prompt_rows
from slime.rollout.rm_hub import extract_boxed_answer
from slime.utils.types import Sample

HELD_OUT = 128


def correct(completion: list[dict[str, Any]], answer: str) -> float:
    """The rubric: 1 if the last message has the answer in a box, else 0."""
    return float(extract_boxed_answer(str(completion[-1]["content"])) == answer)


def load_environment(size: int = 1024, seed: int = 1) -> Any:
    """Return the environment; called by ``verifiers.load_environment``."""
    import verifiers
    from datasets import Dataset

    asked = prompt_rows(size + HELD_OUT, random.Random(seed))["calls"]
    rows = [{"question": row["prompt"], "answer": row["label"]} for row in asked]
    return verifiers.ToolEnv(
        dataset=Dataset.from_list(rows[:size]),
        eval_dataset=Dataset.from_list(rows[size:]),
        tools=[multiply],
        max_turns=4,
        rubric=verifiers.Rubric(funcs=[correct]),
    )


async def reward(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> Any:
    """``--custom-rm-path``, for scripts that require a grader: return the rubric's reward."""
    if isinstance(sample, list):
        return [await reward(args, one) for one in sample]
    return float(sample.metadata["environment_reward"])
