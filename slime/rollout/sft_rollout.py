"""Supervised fine-tuning as a rollout: responses come from the data, without engines.

Each row's prompt is a whole conversation; the loss mask selects the assistant's tokens.
"""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from typing import Any

from slime.flags.security import Trust
from slime.rollout.base_types import check_samples
from slime.rollout.engine_request import processed
from slime.rollout.prompts import map_with_deadline
from slime.utils.errors import ConfigError, DataError
from slime.utils.mask_utils import Message, MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample


@functools.cache
def _mask_generator(
    hf_checkpoint: str, loss_mask_type: str, trust_remote_code: bool, template_kwargs: str
) -> MultiTurnLossMaskGenerator:
    tokenizer = load_tokenizer(hf_checkpoint, trust_remote_code=trust_remote_code)
    kwargs = json.loads(template_kwargs)
    return MultiTurnLossMaskGenerator(tokenizer, tokenizer_type=loss_mask_type, template_kwargs=kwargs)


@functools.cache
def _processor(hf_checkpoint: str, trust_remote_code: bool) -> Any:
    return load_processor(hf_checkpoint, trust_remote_code=trust_remote_code)


def mask_generator(args: Namespace) -> MultiTurnLossMaskGenerator:
    """Return the cached loss mask generator for ``--loss-mask-type``."""
    kwargs = json.dumps(getattr(args, "apply_chat_template_kwargs", None) or {}, sort_keys=True)
    return _mask_generator(args.hf_checkpoint, args.loss_mask_type, Trust.of(args).trust_remote_code, kwargs)


def generate_rollout(
    args: Namespace, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> list[list[Sample]]:
    """Return ``--rollout-batch-size`` groups of one finished sample each.

    Raises:
        ConfigError: ``evaluation`` is True, or ``--n-samples-per-prompt`` is not 1.
        DataError: a prompt is not a conversation, or has no token to train.
    """
    if evaluation:
        raise ConfigError("sft_rollout cannot evaluate: there is nothing to generate. Set --eval-function-path.")
    if args.n_samples_per_prompt != 1:
        raise ConfigError(
            f"--n-samples-per-prompt is {args.n_samples_per_prompt}; sft_rollout needs 1: a row has one response."
        )
    generator = mask_generator(args)
    groups = data_buffer.get_samples(args.rollout_batch_size)
    check_samples(groups, "The data source (--data-source-path) gave", error=DataError)

    def fill(_: str, sample: Sample) -> None:
        has_images = bool(sample.multimodal_inputs)
        processor = _processor(args.hf_checkpoint, Trust.of(args).trust_remote_code) if has_images else None
        fill_from_conversation(sample, generator, processor)

    map_with_deadline(fill, ((f"Sample {sample.index}", sample) for group in groups for sample in group))
    return groups


def fill_from_conversation(
    sample: Sample, generator: MultiTurnLossMaskGenerator, processor: Any | None = None
) -> None:
    """Fill in a sample whose prompt is a conversation: tokens, response length, loss mask, reward 0, COMPLETED.

    The response starts at the first trained token and includes the masked tokens between assistant turns.

    Args:
        processor: Required for conversations with images.

    Raises:
        DataError: the prompt is not a list of messages, has no token to train, or has images and no processor.
    """
    if not isinstance(sample.prompt, list):
        raise DataError(
            f"Sample {sample.index} has a prompt of text; sft_rollout needs messages. "
            "Point --input-key to a list of messages and leave --apply-chat-template off."
        )
    try:
        token_ids, loss_mask = _ids_and_mask(sample, sample.prompt, generator, processor)
    except DataError as error:
        raise DataError(f"Sample {sample.index}: {error}") from error
    [response_length] = generator.get_response_lengths([loss_mask])
    if response_length == 0:
        raise DataError(
            f"Sample {sample.index} has no token to train: no assistant message, or all of them have "
            f"step_loss_mask 0. Its roles are {[message.get('role') for message in sample.prompt]}."
        )
    sample.tokens = token_ids
    sample.response_length = response_length
    sample.loss_mask = loss_mask[-response_length:]
    sample.reward = 0
    sample.status = Sample.Status.COMPLETED


def _ids_and_mask(
    sample: Sample, messages: list[Message], generator: MultiTurnLossMaskGenerator, processor: Any | None
) -> tuple[list[int], list[int]]:
    tools = sample.metadata.get("tools")
    if not sample.multimodal_inputs:
        return generator.get_loss_mask(messages, tools=tools)
    if processor is None:
        raise DataError("it has images, and the model of --hf-checkpoint has no processor.")
    ids, sample.multimodal_train_inputs = processed(generator.render(messages, tools), sample, processor)
    return generator.get_loss_mask_with_multimodal_alignment(messages, ids, tools)
