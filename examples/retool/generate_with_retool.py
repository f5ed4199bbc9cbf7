"""Tool use in several turns: the policy writes Python code and reads its output.

    --custom-generate-function-path examples.retool.generate_with_retool.generate
    --custom-rm-path examples.retool.generate_with_retool.reward_func

If a turn contains ``python`` code blocks in backticks, the last one is run and its output is the next message.  A turn
without one is the final answer.  Settings, by ``--custom-config-path``: ``retool_max_turns``, ``retool_time_s``,
``retool_memory_mib``, ``retool_processes``.

Source: training with an interpreter in the rollout is from ReTool, arXiv:2504.11536.
"""

from __future__ import annotations

import functools
import re
from argparse import Namespace
from typing import Any

from examples.retool.tool_sandbox import Limits, PythonSandbox
from examples.tiny_arithmetic.reward import ends_behind_its_box
from slime.agent.sandbox import check_local_sandbox
from slime.rollout.multi_turn import converse
from slime.rollout.rm_hub import grade_answer_verl
from slime.utils.types import Sample

MAX_TURNS = 4
PROCESSES = 8
"""Maximum programs that run concurrently in this rollout process."""
HALF_MARK = 0.1
"""Reward of a wrong answer if a program ran successfully."""

_CODE = re.compile(r"```(?:python|py)\n(.*?)```", re.DOTALL)


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """``--custom-generate-function-path``: run programs until the policy answers."""
    sandbox = sandbox_of(
        Limits(
            time_s=float(getattr(args, "retool_time_s", Limits.time_s)),
            memory_mib=int(getattr(args, "retool_memory_mib", Limits.memory_mib)),
        ),
        int(getattr(args, "retool_processes", PROCESSES)),
        getattr(args, "unsafe_local_sandbox", False),
    )

    async def environment(turn: str) -> str | None:
        programs = _CODE.findall(turn)
        if not programs:
            return None
        result = await sandbox.run(programs[-1])
        count = "num_programs" if result.is_ok else "num_failed_programs"
        sample.metadata[count] = sample.metadata.get(count, 0) + 1
        return result.output

    max_turns = getattr(args, "retool_max_turns", MAX_TURNS)
    return await converse(args, sample, sampling_params, environment, max_turns=max_turns)


generate.check_args = check_local_sandbox


@functools.cache
def sandbox_of(limits: Limits, processes: int, is_unsafe: bool) -> PythonSandbox:
    """Return the sandbox shared by all samples of the process."""
    return PythonSandbox(limits, processes=processes, is_unsafe=is_unsafe)


def grade(sample: Sample) -> float:
    """Return 1 for a right answer, 0.1 for a wrong one if a program ran successfully, 0 for a truncated response."""
    if sample.status is not Sample.Status.COMPLETED or not ends_behind_its_box(sample):
        return 0.0
    answer = sample.response.rpartition("\\boxed{")[2]
    if grade_answer_verl("\\boxed{" + answer.partition("}")[0] + "}", sample.label):
        return 1.0
    return HALF_MARK * bool(sample.metadata.get("num_programs"))


async def reward_func(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """``--custom-rm-path``: return a number for one sample, or a list for a list of samples."""
    if isinstance(sample, list):
        return [grade(one) for one in sample]
    return grade(sample)
