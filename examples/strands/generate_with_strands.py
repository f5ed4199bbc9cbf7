"""``--custom-generate-function-path examples.strands.generate_with_strands.generate``.

A Strands agent (``pip install -e '.[strands]'``) with a multiplication tool plays each sample.  It is built as its
documentation describes, with the model behind the OpenAI API, and has no code for training.
"""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from typing import Any

from slime.ext.agent.session import TURN_TIMEOUT_S, play
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """``--custom-generate-function-path``: the reward is 1 if the agent's last box holds the label."""

    async def answer(url: str, sid: str) -> float:
        question = str(sample.metadata.get("question", sample.prompt))
        boxes = _BOX.findall(await ask(f"{url}/v1", sid, question))
        return float(bool(boxes) and boxes[-1] == str(sample.label))

    return await play(args, sample, sampling_params, answer)


async def ask(url: str, key: str, question: str) -> str:
    """Return the agent's final text, or "" if a limit or the end of the rollout stopped it."""
    # Imported here, because only this example needs the package.
    import openai
    from strands import Agent
    from strands.models.openai import OpenAIModel
    from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException

    client = {"base_url": url, "api_key": key, "timeout": TURN_TIMEOUT_S, "max_retries": 0}
    agent = Agent(
        model=OpenAIModel(client_args=client, model_id="policy"),
        tools=[_multiply_tool()],
        callback_handler=None,
        retry_strategy=None,
    )
    try:
        return str(await agent.invoke_async(question))
    except (openai.APIError, ContextWindowOverflowException, MaxTokensReachedException) as error:
        logger.info("The agent stopped: %s", error)
        return ""


def _multiply_tool() -> Any:
    from strands import tool

    @tool
    def multiply(a: int, b: int) -> str:
        """The product of two integers.

        Args:
            a: the first.
            b: the second.
        """
        return str(a * b)

    return multiply
