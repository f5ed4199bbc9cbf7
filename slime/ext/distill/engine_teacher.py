"""On-policy distillation from a teacher that an SGLang server runs.

    --use-opd --opd-type sglang --rm-url http://TEACHER/generate
    --custom-rm-path slime.rollout.on_policy_distillation.reward_func
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards

Several teachers: ``--opd-teachers math=http://A/generate code=http://B/generate`` in place of ``--rm-url``.

The "reward" of a sample is the teacher's answer to its tokens, with the log-prob of each; the second function makes
``sample.teacher_log_probs`` of it.  The trainer then adds ``-opd_kl_coef * (student - teacher)`` to the advantages
(``slime.ext.distill.guide``).  Evaluation needs a grader: name it in ``--eval-config``.

A teacher inside the trainer, ``--opd-type megatron``, needs none of this.  Teacher and student must have the same
tokens.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime.ext.distill.flags import TeacherConfig
from slime.rollout.rm_hub.remote import UnusableAnswer, ask_patiently
from slime.train_data.convert import named_entry
from slime.utils.errors import ConfigError, DataError, GraderError
from slime.utils.http_utils import RETRIED_STATUSES, decode_json, encode_json, job_headers, separate_sessions
from slime.utils.processing_utils import encode_image_for_rollout_engine
from slime.utils.redaction import redacted_text
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
REQUEST_TIMEOUT_S = 600.0
MAX_ATTEMPTS = 10

_sessions = separate_sessions(max_connections=MAX_CONNECTIONS, timeout_s=REQUEST_TIMEOUT_S)


async def reward_func(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> Any:
    """Return the teacher's answer to the sample's tokens; a list of answers for a list of samples.

    Raises:
        GraderError: the teacher did not answer, ``MAX_ATTEMPTS`` times, or refused.
        DataError: the sample names no teacher of ``--opd-teachers``.
        ConfigError: ``--rm-url`` is not given.
    """
    if isinstance(sample, list):
        return list(await asyncio.gather(*(reward_func(args, one) for one in sample)))
    config = TeacherConfig.of(args)
    url = config.rm_url
    if config.opd_teachers is not None:
        name = named_entry(sample, config.opd_teacher_key, config.teachers, "--opd-teachers")
        url = config.teachers[name]
    if not url:
        raise ConfigError("--rm-url is not given; it must be the /generate address of the teacher's SGLang server.")
    payload: dict[str, Any] = {
        "input_ids": list(sample.tokens),
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if config.opd_top_k is not None:
        payload["top_logprobs_num"] = config.opd_top_k
    images = (sample.multimodal_inputs or {}).get("images")
    if images:
        payload["image_data"] = [encode_image_for_rollout_engine(image) for image in images]
    return await _ask(url, encode_json(payload))


async def _ask(url: str, body: bytes) -> dict[str, Any]:
    headers = {**job_headers(url), "Content-Type": "application/json"}
    server = f"teacher {redacted_text(url)}"

    async def ask() -> dict[str, Any]:
        async with _sessions.current().post(url, data=body, headers=headers) as response:
            raw = await response.read()
        if response.status >= 400 and response.status not in RETRIED_STATUSES:
            raise GraderError(f"The {server} refused with status {response.status}: {_start_of(raw)}")
        answer = decode_json(raw)
        if response.status >= 400 or not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
            raise UnusableAnswer(f"status {response.status}: {_start_of(raw)}")
        return answer

    return await ask_patiently(ask, server=server, max_attempts=MAX_ATTEMPTS)


def _start_of(raw: bytes) -> str:
    return raw[:300].decode(errors="replace") or "(empty body)"


def post_process_rewards(args: Namespace, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Set ``teacher_log_probs`` of every sample.  The rewards are zeros: the teacher is all there is to learn from.

    A sample whose teacher gave no answer (``--rm-failure-policy``) is taken out of the loss.

    Raises:
        DataError: the answer does not fit the sample's tokens.
    """
    top_k = TeacherConfig.of(args).opd_top_k
    for sample in samples:
        if isinstance(sample.reward, dict) and "reward_error" not in sample.metadata:
            sample.teacher_log_probs = teacher_log_probs(sample, sample.reward)
            if top_k is not None:
                sample.metadata["teacher_top"] = teacher_top(sample, sample.reward, top_k)
        else:
            logger.warning("Sample %s has no response of the teacher; it is excluded from training.", sample.index)
            sample.teacher_log_probs = [0.0] * sample.response_length
            if top_k is not None:
                sample.metadata["teacher_top"] = [[list(range(top_k)), [0.0] * top_k]] * sample.response_length
            sample.remove_sample = True
    return [0.0] * len(samples), [0.0] * len(samples)


def teacher_log_probs(sample: Sample, answer: dict[str, Any]) -> list[float]:
    """Return the teacher's log-prob of each response token, in nats.

    Args:
        answer: has ``meta_info.input_token_logprobs``: ``[log_prob, token_id, ...]`` for each token of the sample, the
            first without a log-prob, since nothing precedes it.
    """
    entries = (answer.get("meta_info") or {}).get("input_token_logprobs")
    if not isinstance(entries, list) or len(entries) <= sample.response_length:
        got = f"{len(entries)} log-probs" if isinstance(entries, list) else "no input_token_logprobs"
        raise DataError(
            f"The teacher gave {got} for sample {sample.index}, which has {len(sample.tokens)} tokens, "
            f"{sample.response_length} of them its response. Does the server at --rm-url return log-probs?"
        )
    tail = entries[1:][len(entries) - 1 - sample.response_length :]
    for entry, token in zip(tail, sample.tokens[len(sample.tokens) - sample.response_length :], strict=True):
        if entry[0] is None or entry[1] != token:
            raise DataError(
                f"The teacher read token {entry[1]} (log-prob {entry[0]}) where sample {sample.index} has {token}; "
                "teacher and student must have the same tokenizer. Check the model behind --rm-url."
            )
    return [float(entry[0]) for entry in tail]


def teacher_top(sample: Sample, answer: dict[str, Any], k: int) -> list[list[list[float]]]:
    """Return, for each response token, the ids and the log-probs of the teacher's ``k`` likeliest tokens.

    Args:
        answer: has ``meta_info.input_top_logprobs``: ``[[log_prob, token_id, ...], ...]`` for each token.

    Raises:
        DataError: a token has not ``k`` of them.
    """
    meta = answer["meta_info"]
    entries = meta.get("input_top_logprobs") or []
    tail = entries[len(entries) - sample.response_length :]
    is_whole = len(entries) == len(meta["input_token_logprobs"])
    if not is_whole or any(entry is None or len(entry) < k for entry in tail):
        raise DataError(
            f"The teacher did not give the {k} likeliest tokens of --opd-top-k at each of the "
            f"{sample.response_length} response tokens of sample {sample.index}. Does its server know "
            "top_logprobs_num?"
        )
    return [[[pair[1] for pair in entry[:k]], [float(pair[0]) for pair in entry[:k]]] for entry in tail]
