"""Hooks in SGLang's processes by which an engine returns the nuclei that it draws from.

A request with ``custom_params: {"return_top_p_token_ids": true}`` gets them, and log-probs renormalised over them.

A token's nucleus goes with SGLang's ``customized_info``: sampler, scheduler, detokenizer and tokenizer manager each
know a list with one entry per token.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from slime.backends.sglang_utils.hooks import register_hooks
from slime.ext.nuclei.nuclei import IDS_KEY, Capture, pack_meta
from slime.utils.sglang_meta import TOP_P_ASK

_ASKED = "_slime_asks_for_nuclei"
"""Attribute of a SamplingBatchInfo: for each request of the batch, whether it asked."""
_CAPTURE = "_slime_capture"
"""Attribute of a Sampler while it samples."""
_BATCH_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_SAMPLER = "sglang.srt.layers.sampler.Sampler"
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def register() -> None:
    """Register the hooks; again: no effect."""
    register_hooks(
        (
            (f"{_BATCH_INFO}.from_schedule_batch", _mark, "after"),
            (f"{_BATCH_INFO}.filter_batch", _filter, "after"),
            (f"{_BATCH_INFO}.merge_batch", _merge, "around"),
            (f"{_BATCH_INFO}.copy_for_forward", _copy, "after"),
            (f"{_SAMPLER}.forward", _forward, "around"),
            (f"{_SAMPLER}._sample_from_probs", _sample_from_probs, "around"),
            (f"{_SAMPLER}._attach_logprobs_to_output", _attach_log_probs, "after"),
            (f"{_MANAGER}.generate_request", _packed, "after"),
        )
    )


def _mark(info: Any, cls: type, batch: Any, *args: Any, **options: Any) -> None:
    asked = [bool((req.sampling_params.custom_params or {}).get(TOP_P_ASK)) for req in batch.reqs]
    setattr(info, _ASKED, asked)


def _asked(info: Any) -> list[bool]:
    return getattr(info, _ASKED, None) or [False] * len(info)


def _filter(result: None, info: Any, keep_indices: Any, *args: Any, **options: Any) -> None:
    # A new list: the copy that a forward pass holds must not change.
    asked = getattr(info, _ASKED, None)
    if asked is not None:
        setattr(info, _ASKED, [asked[int(index)] for index in keep_indices])


def _merge(original: Callable[..., None], info: Any, other: Any) -> None:
    asked = _asked(info) + _asked(other)
    original(info, other)
    setattr(info, _ASKED, asked)


def _copy(copied: Any, info: Any) -> None:
    setattr(copied, _ASKED, _asked(info))


def _forward(
    original: Callable[..., Any], sampler: Any, logits_output: Any, info: Any, *args: Any, **options: Any
) -> Any:
    asked = _asked(info)
    if not any(asked) or sampler.use_ascend_backend:
        return original(sampler, logits_output, info, *args, **options)
    vocab_size = logits_output.next_token_logits.shape[-1]
    capture = Capture(asked, is_greedy=info.is_all_greedy)
    setattr(sampler, _CAPTURE, capture)
    try:
        tokens = original(sampler, logits_output, info, *args, **options)
    finally:
        setattr(sampler, _CAPTURE, None)
    known = logits_output.customized_info or {}
    logits_output.customized_info = known | {IDS_KEY: capture.pack(tokens, vocab_size)}
    return tokens


def _sample_from_probs(
    original: Callable[..., Any], sampler: Any, probs: Any, info: Any, positions: Any, simple_sampling_case: bool
) -> Any:
    capture = getattr(sampler, _CAPTURE, None)
    if capture is not None and not simple_sampling_case:
        from sglang.srt.layers import sampler as module
        from sglang.srt.runtime_context import get_flags

        renorm = {kind: getattr(module, f"{kind}_renorm_prob", None) for kind in ("top_k", "top_p")}
        capture.see(probs, info, backend=get_flags().sampling_backend, renorm=renorm)
    return original(sampler, probs, info, positions, simple_sampling_case)


def _attach_log_probs(
    result: None,
    sampler: Any,
    logits_output: Any,
    log_probs: Any,
    top_logprobs_nums: Any,
    token_ids_logprobs: Any,
    info: Any,
    tokens: Any,
) -> None:
    capture = getattr(sampler, _CAPTURE, None)
    if capture is not None:
        logits_output.next_token_logprobs = logits_output.next_token_logprobs - capture.correction(log_probs, tokens)


async def _packed(answers: AsyncIterator[Any], manager: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
    """Yield a request's answers with their nuclei as JSON can carry them."""
    async with aclosing(answers) as given:  # type: ignore[type-var]
        async for answer in given:
            for one in answer if isinstance(answer, list) else [answer]:
                if isinstance(one, dict) and isinstance(one.get("meta_info"), dict):
                    pack_meta(one["meta_info"])
            yield answer
