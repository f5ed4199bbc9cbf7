"""Conversations: the policy generates a turn, tools or an environment answer, until a turn has no call.

Prompt, turns and observations are one sequence of tokens, and one sample::

    tokens      prompt | turn | observation | turn | observation | turn
    loss_mask            1 1 1  0 0 0 0 0 0 0 1 1 1  0 0 0 0 0 0 0 1 1 1

The engine drew the turns, so they have its log-probs and are trained; the observations have the mask 0.  Tokens are
only ever appended: what was drawn is never tokenised again, which could give other tokens.

``generate`` is the generate function of ``--rollout-tools`` and ``--rollout-environment``; generate functions of the
user's call ``converse`` with another environment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from slime.ext.environments.flags import MULTI_TURN
from slime.flags.reward import RewardConfig
from slime.flags.security import Trust
from slime.observability.trace_utils import trace_span
from slime.rollout.engine_request import add_images, drew_image, processed
from slime.rollout.parsing import parse_model_output
from slime.rollout.prompts import as_messages, encode, map_with_deadline, render
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.sglang_rollout import generate as generate_turn
from slime.rollout.tools import (
    EnvironmentFailure,
    Toolbox,
    TurnsConfig,
    call_in_time,
    set_reward,
    toolbox,
)
from slime.utils.chat_template import apply_chat_template, special_text, special_texts, text_after_end
from slime.utils.errors import ConfigError, DataError
from slime.utils.misc import load_function
from slime.utils.processing_utils import image_sources, load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
Observe = Callable[[str], Awaitable[str | tuple[str, str] | Messages | None]]
"""Text of a turn -> the observation, (role, observation) or messages; None when the turn is the answer."""

_OURS = ("turn_start", "round_number", "prompt_images", "start_rollout_id", "environment_reward")
"""Metadata that a conversation leaves; what else there is came with the row."""
_SAID = "(what the assistant says)"
_PROBE = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SAID}]


class TextEnvironment(Protocol):
    """An environment of text, with the two calls of Gymnasium; they may be coroutines.  ``close()`` is optional."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin; returns ``(observation, info)``.

        Args:
            seed: ``seed`` of the row's metadata, else the number of the group: the same for all samples of a prompt.
            options: the metadata of the row.
        """

    def step(self, action: str, /) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a turn of the policy; returns ``(observation, reward, terminated, truncated, info)``.

        An observation is text, or a list of messages.
        """


async def converse(
    args: Namespace,
    sample: Sample,
    sampling_params: Mapping[str, Any],
    observe: Observe,
    *,
    max_turns: int,
    role: str = "tool",
    evaluation: bool = False,
) -> Sample:
    """Let the policy speak and ``observe`` answer in turn; gives the same sample, grown.

    ``max_new_tokens`` bounds the response as a whole, observations included; so does ``--rollout-max-context-len``
    with the prompt.  A sample that hits a bound, still asks after ``max_turns`` turns, or has drawn a token that
    represents a picture, is TRUNCATED.  One that was aborted in the middle of a turn comes back ABORTED and is
    continued there when it is passed in again.  Turns are counted in ``metadata["round_number"]``, which
    ``--log-multi-turn`` logs.

    Args:
        observe: called once for each finished turn, without the end-of-turn token.  Messages may hold images.
        role: of the observations in the model's chat template, where ``observe`` does not say.
        evaluation: whether ``--eval-max-context-len`` bounds it.
    """
    state = GenerateState(args)
    tokenizer = state.tokenizer
    if not sample.response_length:
        sample.metadata |= {"turn_start": 0, "round_number": 0}  # it may have been drawn before, and given up
        _forget_images(sample)
    if not sample.tokens:
        tools = await asyncio.to_thread(toolbox, TurnsConfig.of(args))
        sample.tokens = _prompt_tokens(state, sample, tools)
    context = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    num_prompt = len(sample.tokens) - sample.response_length
    bounds = [sampling_params.get("max_new_tokens"), None if context is None else context - num_prompt]
    limit = min((bound for bound in bounds if bound is not None), default=None)
    while True:
        sample.status = Sample.Status.PENDING
        await generate_turn(args, sample, {**sampling_params, "max_new_tokens": limit})
        if sample.status is not Sample.Status.COMPLETED:
            return sample
        end = special_text(tokenizer, sample.tokens[-1])
        turn = sample.response[sample.metadata["turn_start"] :].removesuffix(end)
        sample.metadata["round_number"] = sample.metadata.get("round_number", 0) + 1

        began = time.monotonic()
        with trace_span(sample, "environment"):
            observation = await observe(turn)
        sample.non_generation_time += time.monotonic() - began
        if observation is None:
            return sample
        messages = _as_messages(observation, role)
        text = observation_text(tokenizer, messages, end, **sample.apply_chat_template_kwargs)
        images: list[dict[str, Any]] = []
        if image_sources(messages):
            tokens, *images = add_images(sample, messages, text, state.processor)
        else:
            tokens = encode(tokenizer, text, f"Sample {sample.index}: an observation")
        # What follows an observation needs room for a token at least; without it the observation is of no use either.
        is_full = limit is not None and sample.response_length + len(tokens) >= limit
        if sample.metadata["round_number"] >= max_turns or is_full or drew_image(sample, state.processor):
            sample.status = Sample.Status.TRUNCATED
            return sample
        sample.append_response_tokens(args, tokens=tokens, text=text, trainable=False)
        if images:
            sample.metadata.setdefault("prompt_images", len((sample.multimodal_inputs or {}).get("images") or ()))
            sample.multimodal_inputs, sample.multimodal_train_inputs = images
        sample.metadata["turn_start"] = len(sample.response)


def _forget_images(sample: Sample) -> None:
    """Keep the images of the prompt alone, where a sample is begun again."""
    count = sample.metadata.pop("prompt_images", None)
    if count is not None and sample.multimodal_inputs:
        images = sample.multimodal_inputs["images"][:count]
        sample.multimodal_inputs = {**sample.multimodal_inputs, "images": images} if images else None
        sample.tokens, sample.multimodal_train_inputs = [], None


def _prompt_tokens(state: GenerateState, sample: Sample, tools: Toolbox) -> list[int]:
    tokenizer, text, where = state.tokenizer, sample.prompt, f"Sample {sample.index}"
    if not isinstance(text, str):
        offered = sample.metadata.get("tools") or tools.schemas or None
        kwargs = sample.apply_chat_template_kwargs
        rows = [(where, as_messages(text, where))]
        [text] = map_with_deadline(lambda _, messages: render(tokenizer, messages, offered, where, **kwargs), rows)
    if sample.multimodal_inputs and state.processor is not None:
        ids, sample.multimodal_train_inputs = processed(text, sample, state.processor)
        return list(ids)
    return encode(tokenizer, text, where)


def _as_messages(observation: Any, role: str) -> Messages:
    if isinstance(observation, list):
        return observation
    said_by, text = observation if isinstance(observation, tuple) else (role, observation)
    return [{"role": said_by, "content": text}]


def observation_text(tokenizer: Any, messages: Messages, end: str, **kwargs: Any) -> str:
    """Return the text between the end of one turn and the beginning of the next.

    Cut out of a rendered conversation, so it is whatever the model's template makes of the messages, the header of the
    next turn included.

    Args:
        messages: of the tools, of the environment, of a user.
        end: the special token that the engine drew at the end of the turn; the turn is not ended once more.
        kwargs: further arguments of the template.

    Raises:
        ConfigError: the template does not show what the assistant said.
        DataError: the template refuses the messages.
    """

    def text(turns: Messages, **more: Any) -> str:
        return apply_chat_template(tokenizer, turns, "An observation", **more | kwargs)

    def cut(_: str, messages: Messages) -> tuple[str, str]:
        try:
            whole = text([*_PROBE, *messages], add_generation_prompt=True)
        except DataError:  # gpt-oss and Mistral render the answer of a tool after its call alone
            if not (called := _with_calls(messages)):
                raise
            head, whole = text(called[:2]), text(called, add_generation_prompt=True)
            closing = next((mark for mark in special_texts(tokenizer) if head.rstrip().endswith(mark)), "")
            closing = head[head.rfind(closing) :] if closing else ""
            return (closing + whole[len(head) :], closing) if whole.startswith(head) else ("", "")
        return whole.rpartition(_SAID)[2] if _SAID in whole else "", text(_PROBE).rpartition(_SAID)[2]

    [(rest, alone)] = map_with_deadline(cut, [("An observation", messages)])
    if not rest:
        raise ConfigError(
            "The chat template of --hf-checkpoint leaves out a turn of the assistant that another message follows, so "
            "observations cannot be rendered; give the model a template that keeps turns as they were drawn."
        )
    after = text_after_end(tokenizer, rest, alone, end)
    return rest if after is None else after


def _with_calls(messages: Messages) -> Messages:
    """Return a question, a turn that calls the tools whose answers the messages are, and these; none without any."""
    answers = [
        {**one, "name": one.get("name") or "tool", "tool_call_id": f"{number:09}"}
        for number, one in enumerate(messages)
        if one["role"] == "tool"
    ]
    calls = [
        {"id": one["tool_call_id"], "type": "function", "function": {"name": one["name"], "arguments": {}}}
        for one in answers
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    return [_PROBE[0], turn, *answers, *(one for one in messages if one["role"] != "tool")] if calls else []


# --rollout-tools and --rollout-environment


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Play a conversation with ``--rollout-tools``, ``--rollout-environment`` or both.

    The calls of a turn are answered at the same time, each by a message; a turn without calls is a step of the
    environment, or the answer.  The sum of the environment's rewards is the reward, unless a grader is named: it finds
    them in ``metadata["environment_reward"]``.  An environment that raises or takes too long costs its sample, which
    is FAILED and trains nothing.  The environment of a continued sample begins again and gets the same turns.
    """
    config = TurnsConfig.of(args)
    player = _Player(config, sample, await asyncio.to_thread(toolbox, config))
    limits: dict[str, Any] = {"max_turns": config.rollout_max_turns, "evaluation": evaluation}
    if config.rollout_environment is None:
        return await converse(args, sample, sampling_params, player.observe, **limits)
    failure = None
    try:
        await player.begin()
        await converse(args, sample, sampling_params, player.observe, **limits)
    except EnvironmentFailure as error:
        failure = error
    finally:
        await player.close()
    if failure is not None or sample.status is not Sample.Status.ABORTED:
        await set_reward(RewardConfig.of(args), sample, player.total_reward, failure)
    return sample


class _Player:
    """Tools and environment of a sample, for one call of ``generate``."""

    def __init__(self, config: TurnsConfig, sample: Sample, tools: Toolbox) -> None:
        self.total_reward = 0.0
        self._config, self._sample, self._tools = config, sample, tools
        self._environment: Any = None

    async def begin(self) -> None:
        """Begin the environment, and bring it to where the sample is."""
        sample, path = self._sample, str(self._config.rollout_environment)
        turns = sample.metadata.pop("turns", []) if sample.response_length else []
        self._environment = await self._in_time(load_function(path), f"{path}()")
        seed = sample.metadata.get("seed", sample.group_index)
        options = {key: value for key, value in sample.metadata.items() if key not in _OURS}
        observation, _ = await self._call("reset", 2, seed=seed, options=options)
        sample.metadata["turns"] = []
        for turn in turns:
            await self._step(turn)
        if not sample.tokens:
            asked = as_messages(sample.prompt, f"Sample {sample.index}")
            for message in _as_messages(observation, "user") if observation else []:
                if message["role"] == asked[-1]["role"]:  # templates may refuse two of a role in a row
                    asked[-1] = message | {"content": f"{asked[-1]['content']}\n\n{message['content']}"}
                else:
                    asked.append(message)
            sample.prompt = asked

    async def observe(self, turn: str) -> Messages | None:
        """Answer the calls of a turn; without any it is a step of the environment, or the answer."""
        config = self._config
        parsed = parse_model_output(
            turn,
            tools_schema=self._tools.schemas,
            tool_parser_name=config.sglang_tool_call_parser,
            reasoning_parser_name=config.sglang_reasoning_parser,
        )
        uses = parsed.tool_uses
        if uses:
            calls = (self._tools.call(use["name"], use["input"], timeout_s=config.turn_timeout_s) for use in uses)
            answers = await asyncio.gather(*calls)
            return [
                {"role": "tool", "name": use["name"], "content": answer}
                for use, answer in zip(uses, answers, strict=True)
            ]
        if self._tools.schemas and parsed.ill_formed and parsed.text:
            said = f"Error: this call cannot be read; the tools are {', '.join(self._tools.functions)}."
            return [{"role": "tool", "content": said}]
        return None if self._environment is None else await self._step(turn)

    async def close(self) -> None:
        """Let the environment free what it holds."""
        if hasattr(self._environment, "close"):
            try:
                await self._call("close", None)
            except EnvironmentFailure as error:
                logger.warning("%s", error)

    async def _step(self, turn: str) -> Messages | None:
        observation, reward, is_terminated, is_truncated, _ = await self._call("step", 5, turn)
        try:
            self.total_reward += float(reward)
        except (TypeError, ValueError) as error:
            raise EnvironmentFailure(f"{self._config.rollout_environment}.step gave the reward {reward!r}") from error
        self._sample.metadata["turns"].append(turn)
        return None if is_terminated or is_truncated else _as_messages(observation, "user")

    async def _call(self, name: str, num_values: int | None, *values: Any, **named: Any) -> Any:
        what = f"{self._config.rollout_environment}.{name}"
        answer = await self._in_time(getattr(self._environment, name), what, *values, **named)
        if num_values is not None and (not isinstance(answer, tuple) or len(answer) != num_values):
            raise EnvironmentFailure(f"{what} returned {str(answer)[:200]!r}, not a tuple of {num_values} values")
        return answer

    async def _in_time(self, function: Callable[..., Any], what: str, *values: Any, **named: Any) -> Any:
        try:
            return await call_in_time(function, self._config.turn_timeout_s, *values, **named)
        except Exception as error:  # the user's code may raise anything
            raise EnvironmentFailure(f"{what}: {type(error).__name__}: {error}") from error


def check_tools_and_environment(args: Namespace) -> None:
    """Refuse tools that cannot be described or that the policy is not shown, and an environment that lacks a call.

    Raises:
        ConfigError: names the flag and what is wrong.
    """
    config = TurnsConfig.of(args)
    path = config.rollout_environment
    offered = toolbox(config).schemas
    if offered and "tools" not in (template_kwargs := args.apply_chat_template_kwargs or {}):
        trusts_code = Trust.of(args).trust_remote_code
        _check_template(args.hf_checkpoint, offered, template_kwargs, trusts_code=trusts_code)
    if path is None:
        if not offered:
            raise ConfigError(f"{MULTI_TURN} plays with tools or an environment; give --rollout-tools too.")
        return
    kind = load_function(path)
    missing = [name for name in ("reset", "step") if isinstance(kind, type) and not hasattr(kind, name)]
    if missing or not callable(kind):
        raise ConfigError(
            f"--rollout-environment {path} has no {' and no '.join(missing) or 'call'}; name a class with reset(seed, "
            "options) and step(action), or a function that makes such an object."
        )
    if args.apply_chat_template:
        raise ConfigError(
            "--rollout-environment adds its first observation to the messages of the prompt, which "
            "--apply-chat-template has rendered by then; leave that flag out."
        )


def _check_template(
    hf_checkpoint: str, offered: list[dict[str, Any]], kwargs: Mapping[str, Any], *, trusts_code: bool
) -> None:
    """Refuse a chat template that leaves tools out."""
    tokenizer = load_tokenizer(hf_checkpoint, trust_remote_code=trusts_code)
    rows = [("A question with tools", offered), ("A question without", None)]
    try:
        shown, plain = map_with_deadline(
            lambda where, each: render(tokenizer, _PROBE[:1], each, where, **kwargs), rows
        )
    except DataError as error:
        logger.debug("The rows, which were tried before, are not like this: %s", error)
        return
    if shown == plain:
        raise ConfigError(
            f"--rollout-tools: the chat template of {hf_checkpoint} leaves them out, so the policy never sees "
            "them. Choose a model whose template shows `tools`, or change its chat_template.jinja; for a model that "
            """was taught its tools, say --apply-chat-template-kwargs '{"tools": null}'."""
        )


generate.check_args = check_tools_and_environment  # type: ignore[attr-defined]
