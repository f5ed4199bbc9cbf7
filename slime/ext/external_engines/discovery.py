"""The addresses and properties of external engines (``--rollout-external-engine-addrs``).

Everything is asked of ``/server_info``.  Imports no SGLang, so that the flags can be checked without it.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from slime.backends.sglang_utils.server_control import NoAnswer, ServerControl
from slime.flags.security import Trust
from slime.utils import sglang_meta
from slime.utils.errors import ConfigError, DataError, EngineError, ProcessError
from slime.utils.net import http_url

logger = logging.getLogger(__name__)

INFO_TIMEOUT_S = 30.0
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
FLAG = "--rollout-external-engine-addrs"

SIZE_NAMES = {
    "tp_size": ("tp_size", "tensor_parallel_size"),
    "pp_size": ("pp_size", "pipeline_parallel_size"),
    "ep_size": ("ep_size", "expert_parallel_size"),
    "moe_dp_size": ("moe_dp_size", "moe_data_parallel_size"),
}


@dataclass(frozen=True, kw_only=True)
class ExternalEngineInfo:
    """One external engine."""

    url: str
    worker_type: str
    num_gpus: int
    disaggregation_bootstrap_port: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """tp_size, pp_size, ep_size, moe_dp_size, as far as the engine tells them."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Everything that it tells of itself."""


def discover(addresses: Sequence[str], secret: str | None = None) -> list[ExternalEngineInfo]:
    """Ask every engine what it is.

    Raises:
        ConfigError: an address is malformed or doubled, or nothing answers there.
    """
    urls = [normalise(address) for address in addresses]
    doubled = sorted({url for url in urls if urls.count(url) > 1})
    if doubled:
        raise ConfigError(f"{FLAG} names {', '.join(doubled)} more than once; give each engine one address.")
    return [describe(url, fetch_info(url, secret)) for url in urls]


def normalise(address: str) -> str:
    """Return ``http://host:port`` of ``host:port`` or of a URL.

    Raises:
        ConfigError: another scheme, or no port.
    """
    parts = urlsplit(address if "://" in address else f"http://{address}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or port is None or parts.path not in ("", "/"):
        raise ConfigError(f"{FLAG} has {address!r}; an address is host:port or http://host:port, with its port.")
    return http_url(parts.hostname, port)


def fetch_info(url: str, secret: str | None = None) -> dict[str, Any]:
    """Return the engine's description of itself.

    Raises:
        ConfigError: it does not answer as an SGLang server does.
    """
    server = ServerControl(url, api_key=secret)
    try:
        try:
            info = server.get("/server_info", timeout_s=INFO_TIMEOUT_S)
        except ProcessError:
            info = server.get("/get_server_info", timeout_s=INFO_TIMEOUT_S)
    except ProcessError as error:
        raise ConfigError(
            f"{FLAG} names {url}, which does not tell what it is: {error}. Start the engine before the job."
        ) from error
    if not isinstance(info, dict):
        raise ConfigError(f"{FLAG} names {url}, whose /server_info is {str(info)[:200]!r}; is that an SGLang server?")
    return info


def describe(url: str, info: Mapping[str, Any]) -> ExternalEngineInfo:
    """Describe an engine to slime from its answer of ``/server_info``."""
    sizes = {
        short: int(value)
        for short, names in SIZE_NAMES.items()
        if (value := next((info[name] for name in names if info.get(name) is not None), None)) is not None
    }
    mode = info.get("disaggregation_mode")
    if info.get("encoder_only"):
        worker_type = "encoder"
    else:
        worker_type = mode if mode in ("prefill", "decode") else "regular"
    told = info.get("num_gpus") or info.get("num_gpus_per_engine")
    return ExternalEngineInfo(
        url=url,
        worker_type=worker_type,
        num_gpus=int(told) if told else sizes.get("tp_size", 1) * sizes.get("pp_size", 1),
        disaggregation_bootstrap_port=info.get("disaggregation_bootstrap_port") if worker_type == "prefill" else None,
        sizes=sizes,
        server_args=dict(info),
    )


def check_capabilities(args: Namespace, info: ExternalEngineInfo) -> None:
    """Refuse an engine that cannot do what this run needs; name what is merely different.

    Raises:
        ConfigError: the engine was started without something that the run depends on.
    """
    told = info.server_args
    if args.use_rollout_routing_replay and not told.get("enable_return_routed_experts"):
        raise ConfigError(
            f"the external engine {info.url} was started without --enable-return-routed-experts, which "
            "--use-rollout-routing-replay needs; start it with that flag."
        )
    if args.sglang_enable_deterministic_inference and not told.get("enable_deterministic_inference"):
        raise ConfigError(
            f"the external engine {info.url} was started without --enable-deterministic-inference, which this run "
            "asks for (--sglang-enable-deterministic-inference); start it with that flag."
        )
    if args.rollout_top_p != 1.0 and info.worker_type != "encoder":
        if info.worker_type != "regular":
            raise ConfigError(
                f"the external engine {info.url} does {info.worker_type} only, and --rollout-top-p "
                f"{args.rollout_top_p:g} needs engines that do both; start regular ones, or set --rollout-top-p 1."
            )
        check_returns_nuclei(ServerControl(info.url, api_key=Trust.of(args).job_secret), top_p=args.rollout_top_p)
    served = told.get("model_path")
    if served and served != args.hf_checkpoint:
        logger.warning(
            "The external engine %s was started with %s, this run has --hf-checkpoint %s; the weights are pushed, the "
            "architecture must be the same",
            info.url, served, args.hf_checkpoint,
        )  # fmt: skip


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
