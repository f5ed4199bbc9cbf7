"""Flags of on-policy distillation: a teacher's log-probs added to the advantages."""

from __future__ import annotations

import argparse

from slime.arguments.kinds import non_negative_int


def add_distillation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the distillation group to ``parser``."""
    group = parser.add_argument_group("distillation", "On-policy distillation from a teacher.")
    group.add_argument("--use-opd", action="store_true", help="Add the reverse KL to a teacher to the advantages.")
    group.add_argument(
        "--opd-type", choices=["sglang", "megatron"], default=None, help="Where the teacher runs: engine or trainer."
    )
    group.add_argument("--opd-kl-coef", type=float, default=1.0, help="Weight of the reverse KL.")
    group.add_argument(
        "--opd-teacher-load", default=None, metavar="DIR", help="The teacher's checkpoint (--opd-type megatron only)."
    )
    group.add_argument("--opd-teacher-ckpt-step", type=non_negative_int, default=None, help="Its iteration.")
