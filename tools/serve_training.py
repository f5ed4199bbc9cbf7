"""Serve training: clients run their loops with the `tinker` package and train adapters of one model on our GPUs.

    slime serve-training --hf-checkpoint MODEL --lora-rank 32 --max-tokens-per-gpu 8192 --training-api-port 8600

Every flag of a run may follow; `slime train --help` lists them.  docs/training_service.md says what clients can do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.training_api.flags import SERVICE_FLAGS, TrainingApiConfig, add_training_api_arguments
from slime.flags.first_look import first_look

if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_training_api_arguments(parser)
        parser.parse_args()
    sys.argv[1:] = first_look([*SERVICE_FLAGS, *sys.argv[1:]])  # before the slow imports below
    if find_spec("tinker") is None:
        sys.exit(
            "slime serve-training needs the package tinker, whose messages it reads; pip install -e '.[training-api]'"
        )

from slime.compose import parts, run  # noqa: E402
from slime.ext.training_api.command import allow_connections, read_keys, serve, settings_of  # noqa: E402
from slime.ext.training_api.megatron_backend import check_service, max_length, start_backend  # noqa: E402


def check(args: Namespace) -> None:
    """Reject flags with which no service can run."""
    check_service(args)
    read_keys(TrainingApiConfig.of(args))


def serve_job(args: Namespace) -> None:
    """Start trainer and engines, and serve."""
    config = TrainingApiConfig.of(args)
    allow_connections()
    backend = start_backend(args, parts(args))
    settings = settings_of(args, max_length=max_length(args))
    host, port = config.training_api_host, config.training_api_port
    asyncio.run(serve(backend, settings, read_keys(config), host, port))


if __name__ == "__main__":
    run(serve_job, check)
