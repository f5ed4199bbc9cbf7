"""What follows from ``--save-hf hub:ORG/NAME``."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator

from slime.flags.group import FlagGroup

PREFIX = "hub:"


def add_repository(parser: argparse.ArgumentParser) -> None:
    """Add what :func:`derive_repository` sets to ``parser``."""
    parser.set_defaults(hub_repository=None)


def derive_repository(args: Namespace) -> None:
    """Put a folder in --save in the place of the repository that its exports go to."""
    if args.save_hf is not None and args.save_hf.startswith(PREFIX):
        args.hub_repository = args.save_hf.removeprefix(PREFIX)
        folder = str(args.save).replace("{", "{{").replace("}", "}}")
        args.save_hf = f"{folder}/hf/{{rollout_id}}"


def check_repository(args: Namespace) -> Iterator[str]:
    """Yield a message for a repository that nothing could be written to."""
    if args.hub_repository is None:
        return
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    given = f"--save-hf {PREFIX}{args.hub_repository}"
    if args.save is None:
        yield f"{given} needs --save: an export is written there before it is pushed."
    try:
        validate_repo_id(args.hub_repository)
    except HFValidationError as error:
        yield f"{given} names no repository ({error}); write {PREFIX}ORG/NAME."
    if args.runs_here and get_token() is None:
        yield f"{given} has no token: set HF_TOKEN, or run `hf auth login`."


GROUP = FlagGroup(add_repository, derive=(derive_repository,), check=(check_repository,))
