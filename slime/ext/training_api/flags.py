"""Flags of the training service (``tools/serve_training.py``)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from slime.flags.config import FlagConfig
from slime.flags.group import FlagGroup
from slime.flags.kinds import file_path, non_negative_int, port_number, positive_float, positive_int, text

SERVICE_FLAGS = (
    # No loop runs here, and no optimizer: a client's is on the host.
    *("--num-rollout", "0", "--rollout-batch-size", "1", "--n-samples-per-prompt", "1", "--global-batch-size", "1"),
    "--disable-rollout-global-dataset",
    # Engines hold the base model and take adapters by name.
    *("--lora-push", "adapter"),
    # A dropout draws from a generator that clients would share.
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--lora-dropout", "0"),
    "--use-dynamic-batch-size",
)
"""Flags of every service, to be put before the user's."""


def add_training_api_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group of the training service to ``parser``; train.py accepts the flags and does not read them."""
    group = parser.add_argument_group(
        "training service", "slime serve-training, for loops on a client's side; train.py does not read these."
    )
    group.add_argument(
        "--training-api-host",
        type=text,
        default="127.0.0.1",
        metavar="HOST",
        help="Address of the service; another one than loopback needs --training-api-key-file.",
    )
    group.add_argument("--training-api-port", type=port_number, default=8600, help="Port of the service.")
    group.add_argument(
        "--training-api-dir",
        type=file_path,
        default="training_api",
        metavar="DIR",
        help="Folder of the states that clients save.",
    )
    group.add_argument(
        "--training-api-key-file",
        type=file_path,
        metavar="FILE",
        help="Keys of the clients, one a line, each beginning with tml-. A key sees what it made. Default: whoever is "
        "on this machine is let in.",
    )
    group.add_argument(
        "--training-api-model-name",
        type=text,
        metavar="NAME",
        help="Name by which clients ask for the model, and load its tokenizer. Default: --hf-checkpoint.",
    )
    group.add_argument(
        "--training-api-max-models", type=positive_int, default=32, help="Models that are trained at a time."
    )
    group.add_argument(
        "--training-api-pack-clients",
        action="store_true",
        help="Fill micro-batches with data of several clients. Each is padded to --max-tokens-per-gpu, so that no bit "
        "of a client's numbers depends on others; a client alone waits for a full one. For models without experts, on "
        "one tensor-parallel rank.",
    )
    group.add_argument(
        "--training-api-gpu-adapters",
        type=non_negative_int,
        default=0,
        help="Models whose adapter and Adam's moments stay on the trainer's GPU, 16 bytes a number; those of others "
        "are copied from the host when they are needed.",
    )
    group.add_argument("--training-api-max-sessions", type=positive_int, default=64, help="Clients at a time.")
    group.add_argument(
        "--training-api-max-samplers",
        type=positive_int,
        default=32,
        help="Adapters that engines hold; the one that was not asked for longest goes.",
    )
    group.add_argument(
        "--training-api-session-timeout-s",
        type=positive_float,
        default=300.0,
        help="A client that was not heard from for so long has gone: its models are removed, what it saved stays.",
    )
    group.add_argument(
        "--training-api-request-timeout-s",
        type=positive_float,
        default=1800.0,
        help="Longest that a request may take once its turn has come.",
    )


@dataclass(frozen=True, kw_only=True)
class TrainingApiConfig(FlagConfig):
    """The flags of the training service."""

    training_api_host: str
    training_api_port: int
    training_api_dir: str
    training_api_key_file: str | None
    training_api_model_name: str | None
    training_api_max_models: int
    training_api_pack_clients: bool
    training_api_gpu_adapters: int
    training_api_max_sessions: int
    training_api_max_samplers: int
    training_api_session_timeout_s: float
    training_api_request_timeout_s: float


GROUP = FlagGroup(add_training_api_arguments)
