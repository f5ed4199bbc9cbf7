"""Flags of the server of a Megatron teacher (``tools/serve_teacher.py``)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from slime.flags.group import FlagGroup
from slime.flags.kinds import non_negative_int, port_number, positive_float, positive_int


def add_teacher_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group of the teacher server to ``parser``; train.py accepts the flags and does not read them."""
    group = parser.add_argument_group(
        "teacher server", "A server of a teacher's log-probs, tools/serve_teacher.py; training does not read these."
    )
    group.add_argument("--teacher-port", type=port_number, default=7999, help="Port of the server.")
    group.add_argument(
        "--teacher-warmup-port",
        type=port_number,
        help="Port at which /healthz answers 503 until the server is ready. Default: nothing listens before that.",
    )
    group.add_argument(
        "--teacher-warmup-timeout-s",
        type=positive_float,
        default=3000.0,
        help="The server ends when its warm-up takes longer.",
    )
    group.add_argument(
        "--teacher-sample-reduction-chunk-size",
        type=positive_int,
        default=4096,
        metavar="ROWS",
        help="Rows of logits searched at a time for the likeliest tokens.",
    )
    group.add_argument(
        "--teacher-label-reduction-chunk-size",
        type=positive_int,
        default=4096,
        metavar="ROWS",
        help="Rows of logits reduced at a time to log-probs of the given tokens.",
    )
    group.add_argument(
        "--megatron-server-max-length",
        type=non_negative_int,
        default=0,
        metavar="TOKENS",
        help="Longest sequence that is scored; 0: max_position_embeddings of config.json.",
    )
    group.add_argument(
        "--megatron-server-update-timeout-s",
        type=positive_float,
        default=3600.0,
        help="Longest wait of a request for new weights.",
    )
    group.add_argument(
        "--megatron-server-warmup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Score one sequence of full length before the port opens.",
    )


@dataclass(frozen=True, kw_only=True)
class TeacherServerConfig:
    """The flags of the teacher server."""

    teacher_port: int
    teacher_warmup_port: int | None
    teacher_warmup_timeout_s: float
    teacher_sample_reduction_chunk_size: int
    teacher_label_reduction_chunk_size: int
    megatron_server_max_length: int
    megatron_server_update_timeout_s: float
    megatron_server_warmup: bool


GROUP = FlagGroup(add_teacher_server_arguments)
