"""Builds the body of a request from a sample, and appends the engine's answer to the sample.

A sample that already holds tokens (a partial rollout) is continued: its tokens are the input, and its response so far
counts against ``max_new_tokens``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.rollout.config import RolloutConfig
from slime.rollout.engine_client import send
from slime.utils.errors import DataError, EngineError
from slime.utils.http_utils import HttpStatusError
from slime.utils.processing_utils import (
    encode_image_for_rollout_engine,
    join_images,
    media_of,
    one_id_an_image,
    process_text,
    process_vision_info,
)
from slime.utils.sglang_meta import TOP_P_ASK, problem_with_answer, read_output_tokens
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

BAD_ANSWER_WAIT_S = 2.0
"""Seconds between an unusable answer and the next attempt."""
TOO_LONG = ("longer than the model's context length", "exceeds the model's maximum context length")
"""Parts of the messages with which SGLang refuses a long prompt, alone or with its response (status 400)."""


MAX_PROCESSED = 64
"""Number of prompts whose processed images are cached for their siblings."""
_PROCESSED: dict[tuple[Any, ...], tuple[list[Any], list[int], dict[str, Any]]] = {}
"""(prompt, ids of its images) -> (images, token ids, train inputs).  Holding the images keeps their ``id()`` valid."""


def training_sampling_params(config: RolloutConfig) -> dict[str, Any]:
    """Return the ``sampling_params`` of a training request."""
    params: dict[str, Any] = {
        "temperature": config.rollout_temperature,
        "top_p": config.rollout_top_p,
        "top_k": config.rollout_top_k,
        "max_new_tokens": config.rollout_max_response_len,
        "stop": config.rollout_stop,
        "stop_token_ids": config.rollout_stop_token_ids,
        "skip_special_tokens": config.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if config.rollout_top_p != 1.0:
        # The trainer renormalizes over the nucleus that the engine sampled from, so it needs the nucleus's token ids.
        params["custom_params"] = {TOP_P_ASK: True}
    return params


def _prepare_prompt_ids(
    sample: Sample, tokenizer: Any, processor: Any, encode: Callable[[str], list[int]] | None = None
) -> list[int]:
    """Return the token ids to send: the sample's tokens, or else its prompt tokenized by ``encode`` or ``tokenizer``.

    Multimodal prompts go through the processor.  Its other outputs (pixels, grids) are stored on the sample for the
    trainer.
    """
    is_prepared = not sample.multimodal_inputs or sample.multimodal_train_inputs is not None
    if sample.tokens and is_prepared:
        return list(sample.tokens)
    if not isinstance(sample.prompt, str):
        raise DataError(
            f"The prompt of sample {sample.index} is {type(sample.prompt).__name__}, not text; the engine needs text. "
            "Pass --apply-chat-template, or render the messages in --custom-generate-function-path."
        )
    if processor is not None and sample.multimodal_inputs:
        prompt_ids, sample.multimodal_train_inputs = processed(sample.prompt, sample, processor)
    else:
        prompt_ids = encode(sample.prompt) if encode else tokenizer.encode(sample.prompt, add_special_tokens=False)
    response_ids = sample.tokens[len(sample.tokens) - sample.response_length :]
    return list(prompt_ids) + list(response_ids)


def processed(text: str, sample: Sample, processor: Any) -> tuple[list[int], dict[str, Any] | None]:
    """Tokenize a text with the images of a sample.

    Returns:
        The token ids, and the trainer's multimodal inputs: tensors computed once and shared by siblings, or None.
    """
    media = media_of(sample)
    key = (text, *map(id, media))
    if key not in _PROCESSED:
        _PROCESSED[key] = (media, *process_text(text, sample.multimodal_inputs, processor))
        if len(_PROCESSED) > MAX_PROCESSED:
            del _PROCESSED[next(iter(_PROCESSED))]
    _, prompt_ids, train_inputs = _PROCESSED[key]
    return prompt_ids, dict(train_inputs) or None


def add_images(
    sample: Sample, messages: list[dict[str, Any]], text: str, processor: Any
) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    """Tokenize messages that add images to a sample; the sample itself is not changed.

    Args:
        text: The messages rendered by the chat template.

    Returns:
        The token ids, and the sample's new ``multimodal_inputs`` and ``multimodal_train_inputs``.

    Raises:
        DataError: an image cannot be used, or the model has no processor.
    """
    if processor is None:
        raise DataError(
            f"Sample {sample.index} is answered with images; the model of --hf-checkpoint has no processor."
        )
    media = process_vision_info(messages, processor)
    ids, new = processed(text, Sample(multimodal_inputs=media), processor)
    shown = sample.multimodal_inputs or {}
    images = [*(shown.get("images") or ()), *media["images"]]
    return ids, {**shown, "images": images}, join_images(sample.multimodal_train_inputs, new)


def drew_image(sample: Sample, processor: Any) -> bool:
    """Return True if the policy drew an image or video placeholder token, or GLM-4V's video start token.

    Such a sample cannot be continued: engine and trainer would take the token for an image position.
    """
    names = () if processor is None else ("image_token_id", "video_token_id", "video_start_id")
    media = {vars(processor).get(name) for name in names}
    drawn = sample.tokens[len(sample.tokens) - sample.response_length :]
    masks = [1] * len(drawn) if sample.loss_mask is None else sample.loss_mask
    return any(mask and token in media for token, mask in zip(drawn, masks, strict=True))


def _payload(
    config: RolloutConfig, sample: Sample, input_ids: list[int], params: dict[str, Any], image_token: int | None = None
) -> dict[str, Any]:
    """Return the body of a request.

    If ``image_token`` is known, a request with images sends token ids, which keep the drawn tokens exactly, with one
    placeholder token per image for the engine's processor to expand.  Otherwise it sends text.
    """
    payload: dict[str, Any] = {"sampling_params": params, "return_logprob": True}
    if config.use_rollout_routing_replay:
        payload["return_routed_experts"] = True
    shown = sample.multimodal_inputs or {}
    if others := [kind for kind, items in shown.items() if items and kind != "images"]:
        raise DataError(
            f"Sample {sample.index} has {', '.join(others)}; requests to engines can carry images only. Remove the "
            "row, or set --custom-generate-function-path."
        )
    if images := shown.get("images"):
        if image_token is None:
            payload["text"] = f"{sample.prompt}{sample.response}"
        else:
            payload["input_ids"] = one_id_an_image(input_ids, image_token)
        payload["image_data"] = [encode_image_for_rollout_engine(image) for image in images]
    else:
        payload["input_ids"] = input_ids
    return payload


def request_payload(
    config: RolloutConfig, sample: Sample, sampling_params: dict[str, Any], state: Any
) -> dict[str, Any] | None:
    """Return the body of ``/generate`` for the rest of the sample, or None after marking the sample TRUNCATED.

    A sample is truncated if no tokens of its budget are left, or if its response holds an image placeholder token.

    Raises:
        DataError: the sample is neither pending nor aborted, or its prompt cannot be sent.
    """
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise DataError(
            f"Sample {sample.index} is {sample.status.value}; only pending and aborted samples can be generated. "
            "Look at the data source or the custom generate function that returned it."
        )
    encode = getattr(state, "prompt_ids", None)
    input_ids = _prepare_prompt_ids(sample, state.tokenizer, state.processor, encode)
    if not sample.tokens:
        sample.tokens = list(input_ids)

    params = dict(sampling_params)
    if params.get("max_new_tokens") is not None:
        params["max_new_tokens"] -= sample.response_length
        if params["max_new_tokens"] <= 0:
            sample.status = Sample.Status.TRUNCATED
            return None
    if sample.multimodal_inputs and drew_image(sample, state.processor):
        sample.status = Sample.Status.TRUNCATED
        return None
    return _payload(config, sample, input_ids, params, getattr(state.processor, "image_token_id", None))


async def ask(
    config: RolloutConfig, sample: Sample, payload: dict[str, Any], *, is_over: Callable[[], bool]
) -> dict[str, Any]:
    """Send a request and return a usable answer.

    With fault tolerance, unusable answers are retried until the health monitor has evicted the engine.

    Args:
        is_over: Returns True once the rollout is over; unusable answers are then not retried.

    Raises:
        DataError: the prompt is longer than the model's context.
        EngineError: no engine answered, or the answers stayed unusable.
    """
    deadline_s: float | None = None
    while True:
        try:
            output = await send(config, payload, sample.session_id)
        except HttpStatusError as error:
            if sample.response_length == 0 and any(text in error.body for text in TOO_LONG):
                raise DataError(
                    f"The prompt of sample {sample.index} does not fit into an engine ({error.body[:300]}). "
                    "--rollout-max-prompt-len N (of an evaluation: --eval-max-prompt-len N) leaves out prompts of "
                    "more than N tokens."
                ) from error
            raise
        try:
            check_answer(config, sample, output, payload)
            return output
        except EngineError as error:
            if deadline_s is None:  # counted from the first bad answer, which may itself have taken long
                deadline_s = time.monotonic() + config.bad_answer_patience_s
            if is_over() or time.monotonic() >= deadline_s:
                raise
            logger.warning("%s Asking again.", error)
        await asyncio.sleep(BAD_ANSWER_WAIT_S)


def check_answer(config: RolloutConfig, sample: Sample, output: Any, payload: dict[str, Any]) -> None:
    """Check an engine's answer.

    Raises:
        EngineError: the answer is unusable.  The message names the field, and the request id used in the engine's log.
    """
    problem = problem_with_answer(output, payload)
    if problem is None:
        return
    meta = output.get("meta_info") if isinstance(output, dict) else None
    request = f"request {meta['id']}, " if isinstance(meta, dict) and "id" in meta else ""
    raise EngineError(
        f"The answer to sample {sample.index} cannot be used ({request}engine behind {config.router_url}): {problem}"
    )


Decode = Callable[[list[int]], str]
CUT = "\ufffd"
"""What tokenizers decode an incomplete UTF-8 character to."""
_SEAM_TOKENS = 16
"""Tokens to look back for a cut character: more than one character takes, including some text before it."""


def decoder_of(state: Any, payload: dict[str, Any]) -> Decode | None:
    """Return a function that decodes ids as the engine does for this request; None if the tokenizer cannot decode."""
    decode = getattr(state.tokenizer, "decode", None)
    shows_special = not payload["sampling_params"].get("skip_special_tokens", True)
    return None if decode is None else lambda ids: decode(ids, skip_special_tokens=not shows_special)


def append_output(args: Namespace, sample: Sample, output: Any, decode: Decode | None = None) -> None:
    """Append one engine answer to the sample.

    Args:
        decode: Decodes ids to text, to join an answer to one that was cut within a character.

    Raises:
        EngineError: the answer is unusable.
    """
    if problem := problem_with_answer(output, {}):
        raise EngineError(f"The answer to sample {sample.index} cannot be used: {problem}")
    append_checked(args, sample, output, decode)


def append_checked(args: Namespace, sample: Sample, output: dict[str, Any], decode: Decode | None = None) -> None:
    """Like ``append_output``, for an answer that ``check_answer`` has already checked."""
    meta_info = output["meta_info"]
    tokens, log_probs = read_output_tokens(meta_info)
    text, response = output.get("text") or "", sample.response
    if decode is not None and tokens and response.endswith(CUT):
        sample.response, text = _joined(sample, tokens, text, decode)
    try:
        sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, meta_info=meta_info, text=text)
    except ValueError as error:  # top-p spans or routed experts that do not fit the tokens
        sample.response = response
        raise EngineError(f"The answer to sample {sample.index} cannot be used: {error}") from error


def _joined(sample: Sample, tokens: list[int], text: str, decode: Decode) -> tuple[str, str]:
    """Return the response up to a cut character, and the text from there on including the new tokens.

    Decodes old and new ids together, starting from the fewest last ids whose decoded text the response ends with.
    """
    drawn = sample.tokens[len(sample.tokens) - sample.response_length :]
    before = sample.response.rstrip(CUT)
    for count in range(1, min(len(drawn), _SEAM_TOKENS) + 1):
        end = decode(drawn[-count:])
        whole = end.rstrip(CUT)
        if before.endswith(whole) and not whole.startswith(CUT) and (whole or count == len(drawn)):
            return before.removesuffix(whole), decode([*drawn[-count:], *tokens])
    return sample.response, text
