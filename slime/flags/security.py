"""The job's own secret, which guards its servers (docs/security.md)."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slime.flags.config import FlagConfig
from slime.flags.group import FlagGroup
from slime.flags.kinds import file_path
from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

SECRET_BYTES = 32


def add_security_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the security group to ``parser``."""
    group = parser.add_argument_group("security", "Who may reach the servers of the job, and whose code it runs.")
    group.add_argument(
        "--job-secret-file",
        type=file_path,
        metavar="FILE",
        help="File with the secret that engines, routers and the job's other servers require from clients; created, "
        "readable only by its owner, if it does not exist. Default: --sglang-api-key, else a secret that only the "
        "job knows.",
    )
    group.add_argument(
        "--no-job-secret",
        action="store_true",
        help="Do not guard any server: anyone who can reach an engine's address can replace its weights and run code "
        "in it.",
    )

    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="Run the Python code in the model's folder for its tokenizer, config or model, in the job and in its "
        "engines.",
    )


@dataclass(frozen=True, kw_only=True)
class SecretFlags(FlagConfig, flags=(add_security_arguments,)):
    """The flags that determine the job's secret, with defaults for those of SGLang and its router."""

    job_secret_file: str | None
    no_job_secret: bool
    sglang_admin_api_key: str | None = None
    sglang_api_key: str | None = None
    router_api_key: str | None = None
    sglang_enable_http2: bool = False
    sglang_grpc_mode: bool = False

    @property
    def given(self) -> dict[str, str]:
        """Keys given on the command line, by flag."""
        keys = {
            "--sglang-admin-api-key": self.sglang_admin_api_key,
            "--sglang-api-key": self.sglang_api_key,
            "--router-api-key": self.router_api_key,
        }
        return {flag: key for flag, key in keys.items() if key}


@dataclass(frozen=True, kw_only=True)
class Trust(FlagConfig):
    """The job's secret, None without one, and ``--trust-remote-code``."""

    job_secret: str | None = None
    trust_remote_code: bool = False


def derive_job_secret(args: Namespace) -> None:
    """Take the secret from its file or the command line, or create one."""
    flags = SecretFlags.of(args)
    if flags.no_job_secret:
        logger.warning("--no-job-secret: anyone who can reach this job's addresses can run code in its engines.")
        args.job_secret = None
    elif flags.job_secret_file is not None:
        args.job_secret = secret_of_file(Path(flags.job_secret_file), "--job-secret-file")
    else:
        args.job_secret = next(iter(flags.given.values()), None) or new_secret()


def new_secret() -> str:
    """Return a new random secret."""
    return secrets.token_urlsafe(SECRET_BYTES)


def secret_of_file(path: Path, flag: str, *, make: bool = True) -> str:
    """Return the secret in a file.  If the file does not exist, create it, or raise an error if ``make`` is False.

    Raises:
        ConfigError: the file cannot be read or created, is empty, or is readable by other users.
    """
    try:
        if make and not path.exists():
            _make_secret(path)
        text = path.read_text(encoding="utf-8").strip()
        mode = path.stat().st_mode & 0o777
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read or made: {error}.") from error
    if not text or not text.isascii() or any(letter.isspace() for letter in text):
        raise ConfigError(f"{flag} {path} must hold one word of ASCII letters; write one, or remove the file.")
    if mode & 0o077:
        raise ConfigError(f"{flag} {path} has mode {mode:04o}: other users may read it; chmod 600 {path}.")
    return text


def _make_secret(path: Path) -> None:
    """Create ``path`` with a new secret, atomically with its content; an existing file stays."""
    handle, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # readable only by its owner
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(new_secret() + "\n")
        with contextlib.suppress(FileExistsError):  # another process was first; its secret is used
            os.link(unfinished, path)
    finally:
        os.unlink(unfinished)


def check_security(args: Namespace) -> Iterator[str]:
    """Yield one message per invalid combination of keys."""
    flags = SecretFlags.of(args)
    names = " and ".join(flags.given)
    if flags.no_job_secret and (flags.given or flags.job_secret_file):
        yield f"--no-job-secret turns off what {names or '--job-secret-file'} turns on; keep one."
    elif flags.given and flags.job_secret_file:
        yield f"--job-secret-file and {names} both give the job's secret; keep one."
    elif len(set(flags.given.values())) > 1:
        yield f"{names} differ: one secret guards the engines and their routers; give one of them."

    unguarded = {"--sglang-enable-http2": flags.sglang_enable_http2, "--sglang-grpc-mode": flags.sglang_grpc_mode}
    for flag in (flag for flag, is_given in unguarded.items() if is_given and not flags.no_job_secret):
        yield f"{flag} starts a server that no secret can guard; drop it, or add --no-job-secret."


GROUP = FlagGroup(
    add_security_arguments, derive=(derive_job_secret,), check=(check_security,), once=(derive_job_secret,)
)
