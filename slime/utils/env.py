"""Every environment variable that slime reads or sets for a child process.

Nothing else in the package accesses ``os.environ``: this is the complete list, typed, with defaults.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.utils.errors import ConfigError


def get_str(name: str, default: str | None = None) -> str | None:
    """Return the variable's text, or ``default`` if unset or empty."""
    return os.environ.get(name) or default


def get_bool(name: str) -> bool:
    """Return True for 1, true, yes, on; False for 0, false, no, off, or if unset or empty.

    Raises:
        ConfigError: the variable has another value.
    """
    value = os.environ.get(name, "").strip()
    if value and not is_yes(value) and value.lower() not in ("0", "false", "no", "off"):
        raise ConfigError(f"The environment variable {name} is {value!r}; it must be 1 (yes) or 0 (no), or unset.")
    return is_yes(value)


def is_yes(value: str | None) -> bool:
    """Return True if a variable's text means yes."""
    return (value or "").strip().lower() in ("1", "true", "yes", "on")


def get_int(name: str, default: int) -> int:
    """Return the variable as a non-negative integer, or ``default`` if unset or empty.

    Raises:
        ConfigError: the variable has another value.
    """
    value = os.environ.get(name, "").strip()
    if value and not (value.isascii() and value.isdigit() and len(value) < 19):
        raise ConfigError(
            f"The environment variable {name} is {value[:80]!r}; it must be a whole number of 0 or more, or unset "
            f"(then it is {default})."
        )
    return int(value or default)


def export(variables: Mapping[str, str]) -> None:
    """Set variables for this process and its future children."""
    os.environ.update(variables)


def unset(*names: str) -> None:
    """Remove variables from this process and its future children."""
    for name in names:
        os.environ.pop(name, None)


def copy() -> dict[str, str]:
    """Return a copy of the whole environment, for a child process."""
    return dict(os.environ)


def without_http_proxies() -> dict[str, str]:
    """Return a copy of the environment without proxies for plain HTTP, which a job's servers use among themselves.

    HTTPS keeps its proxy, because models and packages may come from outside.
    """
    variables = copy()
    of_all = variables.get("all_proxy") or variables.get("ALL_PROXY")
    if of_all and not (variables.get("https_proxy") or variables.get("HTTPS_PROXY")):
        variables["https_proxy"] = of_all
    return {name: value for name, value in variables.items() if name.lower() not in ("http_proxy", "all_proxy")}


def no_proxy_for(*hosts: str) -> dict[str, str]:
    """Return no_proxy variables that exempt this machine and ``hosts`` in addition to those already exempted."""
    known = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    names = [*known, "127.0.0.1", "localhost", "::1", *(host.strip("[]") for host in hosts)]
    text = ",".join(dict.fromkeys(name.strip() for name in names if name.strip()))
    return {"no_proxy": text, "NO_PROXY": text}


def host_ip_override() -> str | None:
    """Return ``SLIME_HOST_IP``: the address or name by which other nodes reach this one.

    Raises:
        ConfigError: it is neither an address nor a host name, or it is a wildcard address.
    """
    host = get_str("SLIME_HOST_IP")
    try:
        is_usable = host is None or not ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        is_usable = re.fullmatch(r"(?!-)[A-Za-z0-9._-]*[A-Za-z][A-Za-z0-9._-]*", host or "") is not None
    if not is_usable:
        raise ConfigError(
            f"The environment variable SLIME_HOST_IP is {host!r}; it must be the address, or the name, by which other "
            "nodes reach this one, without a port, or unset."
        )
    return host


def host_names() -> list[str]:
    """Return ``SLIME_HOST_NAMES``: further names and addresses that clients use for this machine's servers."""
    return (get_str("SLIME_HOST_NAMES") or "").split()


def prefer_ipv6() -> bool:
    """Return ``SLIME_PREFER_IPV6``: whether to determine the host address over IPv6 first."""
    return get_bool("SLIME_PREFER_IPV6")


def accelerator() -> str | None:
    """Return ``SLIME_ACCELERATOR``: the kind of device to compute on, as named by torch; None to choose."""
    return get_str("SLIME_ACCELERATOR")


def log_dir() -> str | None:
    """Return ``SLIME_LOG_DIR``: folder for logs of engines and routers; None for one in the temporary folder."""
    return get_str("SLIME_LOG_DIR")


def cache_dir() -> Path:
    """Return ``SLIME_CACHE_DIR``: folder for results that later jobs reuse; default ``~/.cache/slime``."""
    return Path(get_str("SLIME_CACHE_DIR") or "~/.cache/slime").expanduser()


def log_run() -> str | None:
    """Return ``SLIME_LOG_RUN``: name of the run under which engines and routers log; set by slime."""
    return get_str("SLIME_LOG_RUN")


def job_secret() -> str | None:
    """Return the secret in the file ``SLIME_JOB_SECRET_FILE``, set by slime for rollout-buffer generators; or None."""
    path = get_str("SLIME_JOB_SECRET_FILE")
    try:
        secret = None if path is None else Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The environment variable SLIME_JOB_SECRET_FILE is {path!r}, which cannot be read: {error}."
        ) from error
    if secret is not None and not (secret.isascii() and secret.isprintable() and 0 < len(secret) <= 4096):
        raise ConfigError(
            f"The file {path!r} of the environment variable SLIME_JOB_SECRET_FILE holds no secret: one line of 1 to "
            "4096 printable ASCII characters is needed."
        )
    return secret


def job_servers() -> list[str]:
    """Return ``SLIME_JOB_SERVERS``: URLs of the servers that require the job's secret."""
    return (get_str("SLIME_JOB_SERVERS") or "").split()


def engine_guard() -> list[Any] | None:
    """Return ``SLIME_ENGINE_GUARD``: the settings that an engine's process passes to its tokenizer workers."""
    text = get_str("SLIME_ENGINE_GUARD")
    try:
        values = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        values = ()
    if values is not None and (not isinstance(values, list) or len(values) != 5):
        raise ConfigError("The environment variable SLIME_ENGINE_GUARD is damaged; slime sets it, leave it unset.")
    return values


def export_engine_guard(values: list[Any]) -> None:
    """Set ``SLIME_ENGINE_GUARD`` for the children of an engine's process, which run no plug-ins."""
    export({"SLIME_ENGINE_GUARD": json.dumps(values)})


def cuda_visible_devices() -> list[str] | None:
    """Return ``CUDA_VISIBLE_DEVICES`` as a list; None if unset (all devices are visible)."""
    text = get_str("CUDA_VISIBLE_DEVICES")
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def visible_index(physical_id: int) -> int:
    """Return a GPU's index among those visible to this process, as counted by torch and SGLang.

    Raises:
        ConfigError: the GPU is hidden from this process.
    """
    visible = cuda_visible_devices()
    if visible is None:
        return physical_id
    if str(physical_id) not in visible:
        raise ConfigError(
            f"this process should use GPU {physical_id}, but CUDA_VISIBLE_DEVICES is {','.join(visible)}; start Ray "
            "with the GPUs that the job may use"
        )
    return visible.index(str(physical_id))


def indexer_rope_is_neox() -> bool | None:
    """Return ``INDEXER_ROPE_NEOX_STYLE``: how the sparse-attention indexer pairs dimensions; None for the model's way.

    Patched engines read it too, so the trainer must use the same value.
    """
    return None if get_str("INDEXER_ROPE_NEOX_STYLE") is None else get_bool("INDEXER_ROPE_NEOX_STYLE")


def int4_fake_qat() -> bool:
    """Return ``OPEN_TRAINING_INT4_FAKE_QAT_FLAG``: the same as ``--int4-qat``."""
    return get_bool("OPEN_TRAINING_INT4_FAKE_QAT_FLAG")


def int4_group_size() -> int | None:
    """Return ``OPEN_TRAINING_INT4_GROUP_SIZE``: the same as ``--int4-qat-group-size``; None when unset."""
    return get_int("OPEN_TRAINING_INT4_GROUP_SIZE", 0) or None


_AGENT_ALIASES = {
    "SANDBOX_IMAGE_METADATA_KEY": "SWE_SANDBOX_IMAGE_METADATA_KEY",
    "SANDBOX_LIFETIME_SEC": "SWE_SANDBOX_LIFETIME_SEC",
    "SANDBOX_RPC_RETRIES": "SWE_RPC_RETRIES",
    "E2B_SANDBOX_SIZE": "SWE_E2B_SANDBOX_SIZE",
}


def agent_setting(name: str) -> str | None:
    """Return ``SLIME_AGENT_<name>``, or its older spelling, for slime.agent's sandboxes and harnesses.

    Names: NODE_TARBALL, CC_TARBALL, CC_EXTRA_ARGS, CC_EXTRA_ENVS, CODEX_TARBALL, CODEX_EXTRA_ARGS, CODEX_EXTRA_ENVS,
    SANDBOX_IMAGE_METADATA_KEY, SANDBOX_LIFETIME_SEC, SANDBOX_RPC_RETRIES, E2B_SANDBOX_SIZE,
    VERIFIERS_PYTHON.
    """
    return get_str(f"SLIME_AGENT_{name}") or get_str(_AGENT_ALIASES.get(name, f"SLIME_AGENT_{name}"))
