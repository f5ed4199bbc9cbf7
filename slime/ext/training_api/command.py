"""A training service as a job: from the flags to the port, until SIGTERM or the death of trainer or engines."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from argparse import Namespace
from pathlib import Path

from aiohttp import web

from slime.ext.training_api.backend import Backend
from slime.ext.training_api.flags import TrainingApiConfig
from slime.ext.training_api.server import application
from slime.ext.training_api.service import TrainingService
from slime.ext.training_api.settings import ServiceSettings
from slime.ext.training_api.wire import TextLimits
from slime.utils.aiohttp_threaded import KEEPALIVE_S, FilteredAccessLogger
from slime.utils.errors import ConfigError, ProcessError
from slime.utils.net import format_host_port, is_loopback

logger = logging.getLogger(__name__)

KEY_PREFIX = "tml-"
"""Of every key; the client sends no other."""
MIN_KEY_LENGTH = 20
CALL_MICRO_BATCHES = 4
"""Micro-batches a GPU in one call of the trainer: enough to fill it, few enough that clients take turns."""
FAREWELL_S = 5.0
"""For clients to fetch why their requests failed, once the backend has ended."""


def read_keys(config: TrainingApiConfig) -> tuple[str, ...]:
    """Return the keys of the clients; none where only this machine may ask.

    Raises:
        ConfigError: the file is missing, lets others read it or has a word that is no key; or there is none, and the
            service would listen to other machines.
    """
    host, name = config.training_api_host, config.training_api_key_file
    if name is None:
        if not is_loopback(host):
            raise ConfigError(
                f"--training-api-host is {host}, which other machines reach; give --training-api-key-file, or "
                "127.0.0.1."
            )
        return ()
    file, flag = Path(name), f"--training-api-key-file {name}"
    try:
        keys, mode = tuple(file.read_text(encoding="utf-8").split()), file.stat().st_mode & 0o777
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} cannot be read: {error}.") from error
    if mode & 0o077:
        raise ConfigError(f"{flag} has mode {mode:04o}: other users may read it; chmod 600 {name}.")
    right = [key.isascii() and key.startswith(KEY_PREFIX) and len(key) >= MIN_KEY_LENGTH for key in keys]
    if not keys or not all(right):
        which = f"key {right.index(False) + 1} of it is none" if keys else "it is empty"
        raise ConfigError(
            f"{flag} must hold keys of at least {MIN_KEY_LENGTH} ASCII letters that begin with {KEY_PREFIX}; {which}."
        )
    return keys


def settings_of(args: Namespace, *, max_length: int) -> ServiceSettings:
    """Return what the flags ask for; ``max_length``: tokens of the longest sequence."""
    config = TrainingApiConfig.of(args)
    return ServiceSettings(
        model_name=config.training_api_model_name or args.hf_checkpoint,
        limits=TextLimits(args.vocab_size, max_length),
        folder=Path(config.training_api_dir).absolute(),
        max_rank=args.lora_rank,
        max_models=config.training_api_max_models,
        max_sessions=config.training_api_max_sessions,
        max_samplers=config.training_api_max_samplers,
        session_timeout_s=config.training_api_session_timeout_s,
        request_timeout_s=config.training_api_request_timeout_s,
        tokens_per_call=args.max_tokens_per_gpu * args.world_size * CALL_MICRO_BATCHES,
    )


async def serve(backend: Backend, settings: ServiceSettings, keys: tuple[str, ...], host: str, port: int) -> None:
    """Answer until SIGTERM or Ctrl-C.

    Raises:
        ProcessError: the port is taken, or the backend has ended.
    """
    ended = asyncio.Event()
    service = TrainingService(backend, settings, ended.set)
    runner = web.AppRunner(
        application(service, keys),
        access_log_class=FilteredAccessLogger,
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=1.0,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
        except OSError as error:
            where = format_host_port(host, port)
            raise ProcessError(f"The service cannot listen at {where}: {error} (--training-api-port).") from error
        logger.info("The training service listens at http://%s", format_host_port(host, port))
        await ended.wait()
        if service.dead is not None:
            await asyncio.sleep(FAREWELL_S)
            raise ProcessError(f"Trainer or engines have ended: {service.dead}") from service.dead
    finally:
        await runner.cleanup()


def allow_connections() -> None:
    """Let this process hold as many connections as the system allows: every open request has one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
