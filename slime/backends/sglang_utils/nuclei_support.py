"""Engines that can return the nuclei they draw from, which ``--rollout-top-p`` below 1 needs.  Imports no SGLang."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.backends.sglang_utils.server_control import NoAnswer, ServerControl
from slime.backends.sglang_utils.sglang_config import SGLangConfig
from slime.utils import sglang_meta
from slime.utils.errors import ConfigError, DataError, EngineError

PROBE_TIMEOUT_S = 60.0
PROBE_PAYLOAD = {
    "input_ids": [1],
    "sampling_params": {
        "max_new_tokens": 1,
        "top_p": 0.5,
        "ignore_eos": True,
        "custom_params": {sglang_meta.TOP_P_ASK: True},
    },
    "return_logprob": True,
}
"""A request for one token and its nucleus."""


def layout_problems(args: Namespace, layout: SGLangConfig) -> Iterator[str]:
    """Yield a message for each flag under which an engine of ours returns no nuclei, where the run needs them."""
    if args.rollout_top_p == 1.0:
        return
    model = next((model for model in layout.models if model.update_weights), layout.models[0])
    wanted = f"--rollout-top-p {args.rollout_top_p:g} needs the nuclei that the engines draw from"
    if model.has_prefill_decode:
        yield (
            f"{wanted}, and prefill engines do not hand that of the first token on; use engines that do both "
            "(no --prefill-num-servers, no prefill and decode groups), or --rollout-top-p 1."
        )
    flags = {name: getattr(args, f"sglang_{name}") for name in _FITTING}
    for settings in ({**flags, **group.overrides} for group in model.server_groups):
        for name, (fitting, reason) in _FITTING.items():
            if settings[name] not in fitting:
                flag = f"--sglang-{name.replace('_', '-')} is {settings[name]}"
                yield f"{wanted}, and {flag}: {reason}, or set --rollout-top-p 1."
                return


_FITTING: dict[str, tuple[tuple[Any, ...], str]] = {
    "speculative_algorithm": ((None, ""), "speculative decoding draws outside the sampler; drop it"),
    "pp_size": ((None, 0, 1), "pipeline stages do not hand them on; set 1"),
    "sampling_backend": (
        (None, "flashinfer", "pytorch"), "only the samplers flashinfer and pytorch can be followed; use one of them"
    ),
}  # fmt: skip
"""Setting of an engine -> the values under which it returns nuclei, and why it does not under another."""


def check_returns_nuclei(server: ServerControl, *, top_p: float) -> None:
    """Ask for one token and look for its nucleus.  No answer in time is no verdict: the queue may be long.

    Raises:
        ConfigError: the engine answers without a nucleus, or refuses.
    """
    remedy = (
        f"--rollout-top-p {top_p:g} needs engines that return the nuclei they draw from. Start it in an environment "
        "in which slime is installed (pip install: SGLang then finds slime's plugin by itself), without speculative "
        "decoding, pipeline stages or prefill/decode; or set --rollout-top-p 1."
    )
    try:
        answer = server.post("/generate", PROBE_PAYLOAD, timeout_s=PROBE_TIMEOUT_S)
    except NoAnswer:
        return
    except EngineError as error:
        raise ConfigError(f"the engine {server.name} refused a request for a nucleus: {error}. {remedy}") from error
    meta = answer.get("meta_info", {}) if isinstance(answer, dict) else {}
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return  # it was aborted with the others
    try:
        spans = sglang_meta.read_top_p_spans(meta, 1)
    except DataError as error:
        raise ConfigError(f"the engine {server.name} returned a malformed nucleus: {error} {remedy}") from error
    if spans is None:
        raise ConfigError(
            f"the engine {server.name} answers without meta_info.{sglang_meta.TOP_P_IDS_KEYS[0]}: {remedy}"
        )
