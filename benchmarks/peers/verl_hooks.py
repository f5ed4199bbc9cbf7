"""Hooks of verl: responses with the lengths in the prompts' rows, and a free reward.

verl is not part of this project's environment; only its own processes import this file.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from benchmarks.peers import workload


@register("forced_length")
class ForcedLength(SingleTurnAgentLoop):  # type: ignore[misc]
    """verl's own single turn, with the response's length forced."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Answer one sample; ``session_id`` is its number among its prompt's samples."""
        length = workload.forced_length(kwargs["extra_info"], int(kwargs["session_id"]))
        return await super().run(sampling_params | {"max_tokens": length, "ignore_eos": True}, **kwargs)


def compute_score(data_source: str, solution_str: str, ground_truth: str, **more: Any) -> float:
    """Grade a response."""
    return workload.score(solution_str)
