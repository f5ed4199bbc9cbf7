"""A conversation of one sample with its environment: the loop below examples/search-r1 and examples/retool.

The policy speaks a turn, the environment answers with an observation, until the policy speaks a turn that asks for
nothing.  Prompt, turns and observations are one sequence of tokens, and one sample::

    tokens      prompt | turn | observation | turn | observation | turn
    loss_mask            1 1 1  0 0 0 0 0 0 0 1 1 1  0 0 0 0 0 0 0 1 1 1

The engine drew the turns, so they have its log-probs and are trained; the observations have the mask 0.  Tokens are
only ever appended: text is never tokenised again, which could give other tokens than those that were drawn.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from slime.observability.trace_utils import trace_span
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.utils.types import Sample

Environment = Callable[[str], Awaitable[str | tuple[str, str] | None]]
"""Text of a turn -> the observation, or (role, observation); None when the turn is the answer."""

_PROBE = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]


async def play(
    args: Namespace,
    sample: Sample,
    sampling_params: dict[str, Any],
    environment: Environment,
    *,
    max_turns: int,
    role: str = "tool",
) -> Sample:
    """Let the policy and ``environment`` speak in turn; gives the same sample, grown.

    ``max_new_tokens`` bounds the response as a whole, observations included; so does ``--rollout-max-context-len``
    with the prompt.  A sample that hits a bound, or still asks after ``max_turns`` turns, is TRUNCATED.  One that was
    aborted in the middle of a turn comes back ABORTED and is continued there when it is passed in again.  Turns are
    counted in ``metadata["round_number"]``, which ``--log-multi-turn`` logs.

    Args:
        environment: called once for each finished turn, without the end-of-turn token.
        role: of the observations in the model's chat template, where the environment does not say.
    """
    tokenizer = GenerateState(args).tokenizer
    if not sample.tokens:
        sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
    num_prompt = len(sample.tokens) - sample.response_length
    limit = _response_limit(args, sampling_params, num_prompt)
    while True:
        turn_start = sample.metadata.setdefault("turn_start", 0)
        sample.status = Sample.Status.PENDING
        await generate(args, sample, sampling_params | {"max_new_tokens": limit})
        if sample.status is not Sample.Status.COMPLETED:
            return sample
        turn = sample.response[turn_start:].removesuffix(tokenizer.eos_token)
        sample.metadata["round_number"] = sample.metadata.get("round_number", 0) + 1

        began = time.monotonic()
        with trace_span(sample, "environment"):
            observation = await environment(turn)
        sample.non_generation_time += time.monotonic() - began
        if observation is None:
            return sample
        said_by, observed = observation if isinstance(observation, tuple) else (role, observation)
        text = observation_text(tokenizer, observed, said_by)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        # What follows an observation needs room for a token at least; without it the observation is of no use either.
        if sample.metadata["round_number"] >= max_turns or sample.response_length + len(tokens) >= limit:
            sample.status = Sample.Status.TRUNCATED
            return sample
        sample.append_response_tokens(args, tokens=tokens, text=text, trainable=False)
        sample.metadata["turn_start"] = len(sample.response)


def _response_limit(args: Namespace, sampling_params: dict[str, Any], num_prompt: int) -> int:
    """Tokens that the response may have in all."""
    limit = sampling_params["max_new_tokens"]
    context = getattr(args, "rollout_max_context_len", None)
    return limit if context is None else min(limit, context - num_prompt)


def observation_text(tokenizer: Any, content: str, role: str) -> str:
    """Return the text between the end-of-turn token of one turn and the beginning of the next.

    Cut out of a rendered conversation, so it is whatever the model's template makes of a message of that role, the
    header of the next turn included.  It holds for templates that end a turn of the assistant with the end-of-sequence
    token and render messages one after another (ChatML and its kin).

    Raises:
        ValueError: the template is of another kind.
    """
    end = tokenizer.eos_token
    before = tokenizer.apply_chat_template(_PROBE, tokenize=False)
    message = {"role": role, "content": content}
    whole = tokenizer.apply_chat_template([*_PROBE, message], tokenize=False, add_generation_prompt=True)
    start = before.rfind(end) + len(end)
    if end not in before or not whole.startswith(before[:start]):
        raise ValueError(
            f"the chat template does not end a turn of the assistant with {end!r} or renders it otherwise when a "
            f"message of role {role!r} follows; examples.multi_turn needs a template of that kind"
        )
    return whole[start:]
