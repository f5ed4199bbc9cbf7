"""Flags that plan a run before it starts; ``slime.compose`` acts on both before the command line is parsed."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator

from slime.flags.group import FlagGroup


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the plan group to ``parser``."""
    group = parser.add_argument_group("plan", "What a run would be, before it takes a GPU.")
    group.add_argument(
        "--plan",
        nargs="?",
        choices=["table", "json"],
        const="table",
        help="Print what the run would be (layout, memory, traffic) and exit; needs no GPU, cluster or checkpoint.",
    )
    group.add_argument(
        "--fit",
        action="store_true",
        help="Choose what the command leaves open of the layout: parallel sizes, recompute, offload, "
        "--max-tokens-per-gpu, engine size and share of memory, for the GPUs that are there: what fits and is fastest "
        "by the plan. The choice and the two next best are printed.",
    )


def check_fit(args: Namespace) -> Iterator[str]:
    """Yield a message for a driver that parses ``--fit`` itself."""
    if args.fit:
        yield "--fit is for train.py, train_async.py and tools/plan.py, which choose before they parse; drop it."


GROUP = FlagGroup(add_plan_arguments, check=(check_fit,))
