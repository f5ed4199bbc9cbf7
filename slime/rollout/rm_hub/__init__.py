"""Rewards: selects the grader of each sample.  Graders are one per file; ``remote`` calls a reward server.

The first of these that is set selects the grader: ``sample.custom_rm_path``, ``--custom-rm-path``,
``sample.metadata["rm_type"]``, ``--rm-type``.  A type with the prefix ``boxed_`` grades the last boxed answer instead
of the whole response.  Built-in graders get the response without the model's end tokens; user-defined functions and
servers get it unchanged.  Every grading has a deadline; ``policy`` handles failures.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import random
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.flags.reward import BOXED_PREFIX, RM_TYPES, RewardConfig
from slime.flags.security import Trust
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.gym import score as score_gym
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score as compute_score_dapo
from slime.rollout.rm_hub.math_utils import compute_math_verify_reward, grade_answer_verl
from slime.rollout.rm_hub.math_utils import extract_answer as extract_boxed_answer
from slime.rollout.rm_hub.policy import GRADER_THREADS, grade_by_policy, within
from slime.rollout.rm_hub.remote import remote_rm
from slime.utils.misc import load_function
from slime.utils.plugins import PluginCall, await_plugin, is_coroutine_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

__all__ = [
    "RM_TYPES",
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_ifbench_reward",
    "compute_score_dapo",
    "extract_boxed_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "remote_rm",
]

MAX_GRADED_CHARS = 200_000
"""Graders that read every word get only this many characters from the end of a response."""
TOKENIZERS: dict[str, Any] = {}
"""This process's tokenizers by ``--hf-checkpoint``; the rollout stores its own here for the graders."""
_READS_EVERY_WORD = ("f1", "gpqa", "ifbench", "gym")

logger = logging.getLogger(__name__)

_GRADERS: dict[str, Callable[[Sample], Any]] = {
    "deepscaler": lambda sample: get_deepscaler_rule_based_reward(sample.response, sample.label),
    "dapo": lambda sample: compute_score_dapo(sample.response, sample.label),
    "math": lambda sample: 1 if grade_answer_verl(sample.response, sample.label) else 0,
    "f1": lambda sample: f1_score(sample.response, str(sample.label))[0],
    "gpqa": lambda sample: compute_gpqa_reward(sample.response, sample.label, sample.metadata),
    "ifbench": lambda sample: compute_ifbench_reward(sample.response, sample.label, sample.metadata),
    "random": lambda sample: random.randint(0, 1),
    "math_verify": lambda sample: compute_math_verify_reward(sample.response, sample.label),
}
assert RM_TYPES == ("remote_rm", "gym", *_GRADERS)


async def async_rm(args: Namespace, sample: Sample, **kwargs: Any) -> Any:
    """Return the reward of one sample: a number, or a dict from which ``--reward-key`` selects an entry.

    If the grader hangs or raises, the reward is that of ``--rm-failure-policy``.

    Raises:
        NotImplementedError: the reward type does not exist or is not set.
        GraderError: ``--rm-max-failures`` consecutive gradings have failed.
    """
    config = RewardConfig.of(args)
    path, rm_type = _custom_path(config, sample), _rm_type(config, sample)

    async def grade() -> list[Any]:
        if path:
            return [await _call_custom(config, path, args, sample, **kwargs)]
        strips = config.hf_checkpoint and rm_type != "remote_rm"
        ends = _end_tokens(config.hf_checkpoint, Trust.of(args).trust_remote_code) if strips else ()
        return [await _grade(args, _without_end(sample, ends), rm_type, config.rm_timeout_s)]

    # A built-in grader either always returns the selected reward entry or never does, which is a mistake in the flags.
    is_remote = rm_type.removeprefix(BOXED_PREFIX) == "remote_rm"
    grader = path if path else f"--rm-type {rm_type}" if is_remote else None
    return (await grade_by_policy(config, [sample], grade, grader=grader))[0]


def _custom_path(config: RewardConfig, sample: Sample) -> str | None:
    return config.custom_rm_path if sample.custom_rm_path is None else sample.custom_rm_path


def _rm_type(config: RewardConfig, sample: Sample) -> str:
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    return (metadata.get("rm_type") or config.rm_type or "").strip()


async def _call_custom(
    config: RewardConfig, path: str, args: Namespace, graded: Sample | list[Sample], **kwargs: Any
) -> Any:
    """Call a user-defined reward function with one sample or a list; plain (not async) functions run in a thread."""
    flag = "--custom-rm-path" if path == config.custom_rm_path else "--eval-config or --eval-custom-rm-path"
    call, function = PluginCall(flag, path, graded), load_function(path)
    if is_coroutine_function(function) or not inspect.isfunction(function):
        return await within(config.rm_timeout_s, await_plugin(call, function, args, graded, **kwargs))
    plain = functools.partial(function, **kwargs)
    in_thread = functools.partial(GRADER_THREADS.run, plain, timeout_s=config.rm_timeout_s)
    reward = await await_plugin(call, in_thread, args, graded)
    return await within(config.rm_timeout_s, reward) if inspect.isawaitable(reward) else reward


def asks_for_lists(path: str | None) -> bool:
    """Return whether the function of ``--custom-rm-path`` grades all samples of a fanned-out execution in one call.

    It does not if its second parameter is named ``sample``, unless that parameter is annotated as a list.
    """
    if not path:
        return False
    parameters = list(inspect.signature(load_function(path)).parameters.values())
    graded = next(iter(parameters[1:]), None)
    return graded is None or graded.name != "sample" or "list" in str(graded.annotation).lower()


@functools.cache
def _end_tokens(hf_checkpoint: str, trust_remote_code: bool) -> tuple[str, ...]:
    """Return a model's special tokens, without closing tags such as ``</answer>`` unless the tag is the EOS token."""
    tokenizer = TOKENIZERS.get(hf_checkpoint)
    if tokenizer is None:
        tokenizer = load_tokenizer(hf_checkpoint, trust_remote_code=trust_remote_code)
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    return tuple(text for text in special if text and (text == tokenizer.eos_token or not text.startswith("</")))


def _without_end(sample: Sample, end_tokens: tuple[str, ...]) -> Sample:
    """Return the sample, or a copy without the special tokens at the end of its response."""
    text = sample.response
    end = position = len(text)
    while True:
        while position and text[position - 1].isspace():
            position -= 1
        token = next((token for token in end_tokens if text.endswith(token, 0, position)), None)
        if token is None:
            break
        end = position = position - len(token)
    if end < len(text):
        sample = copy.copy(sample)
        sample.response = text[:end]
    return sample


async def _grade(args: Namespace, sample: Sample, rm_type: str, timeout_s: float) -> Any:
    """Return the reward of the built-in grader ``rm_type``."""
    if rm_type.startswith(BOXED_PREFIX):
        rm_type = rm_type.removeprefix(BOXED_PREFIX)
        sample = copy.copy(sample)
        sample.response = extract_boxed_answer(sample.response) or ""
    elif rm_type in _READS_EVERY_WORD and len(sample.response) > MAX_GRADED_CHARS:
        sample = copy.copy(sample)
        sample.response = sample.response[-MAX_GRADED_CHARS:]
    if rm_type == "remote_rm":
        return await within(timeout_s, remote_rm(args, sample))
    if rm_type == "gym":
        call = functools.partial(score_gym, sample, is_unsafe=args.unsafe_local_sandbox)
        return await GRADER_THREADS.run(call, timeout_s=timeout_s)
    if rm_type not in _GRADERS:
        raise NotImplementedError(
            f"The reward type {rm_type!r} does not exist; it may be {', '.join(RM_TYPES)}, each also with the prefix "
            f"{BOXED_PREFIX}. Set --rm-type, --custom-rm-path or the sample's metadata['rm_type']."
        )
    # In a thread: a grader may take seconds, and must not block other samples' requests on the event loop.
    return await GRADER_THREADS.run(_reward, _GRADERS[rm_type], sample, timeout_s=timeout_s)


def _reward(grader: Callable[[Sample], Any], sample: Sample) -> Any:
    """Call a grader; if the response is nested too deeply to parse, grade an empty response instead."""
    try:
        return grader(sample)
    except RecursionError as error:
        logger.info("The response of sample %s is nested too deeply for its grader: %s", sample.index, error)
    sample = copy.copy(sample)
    sample.response = ""
    return grader(sample)


async def batched_async_rm(args: Namespace, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """Return the rewards of several samples, in order.

    ``--custom-rm-path`` grades all of them in one call.  Without it, or if a sample has another ``custom_rm_path``,
    each sample is graded separately.
    """
    config = RewardConfig.of(args)
    path = config.custom_rm_path
    if not path or any(_custom_path(config, sample) != path for sample in samples):
        return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))

    async def grade() -> Any:
        return await _call_custom(config, path, args, samples, **kwargs)

    return await grade_by_policy(config, samples, grade, grader=path)  # type: ignore[return-value]
