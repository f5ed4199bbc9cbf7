"""Debugging: running one half of the job, recording and replaying data, checks in CI."""

from __future__ import annotations

import argparse
import re
import string
from argparse import Namespace
from collections.abc import Iterator

from slime.flags.group import FlagGroup, flag_of
from slime.flags.kinds import file_path, non_negative_float, positive_fraction

_TEMPLATE_FIELDS = {
    "save_debug_rollout_data": {"rollout_id"},
    "load_debug_rollout_data": {"rollout_id"},
    "load_forge_rollout_data": {"rollout_id"},
    "save_debug_train_data": {"rollout_id", "rank"},
    "save_hf": {"rollout_id"},
    "ci_save_grad_norm": {"role", "rollout_id", "step_id"},
    "ci_load_grad_norm": {"role", "rollout_id", "step_id"},
}
"""Flag of a file -> the placeholders allowed in it."""
_WRITTEN_IN_EACH_ROLLOUT = ("save_debug_rollout_data", "save_debug_train_data", "ci_save_grad_norm")


def add_debug_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the debug and CI groups to ``parser``."""
    _add_debug(parser)
    _add_ci(parser)


def _add_debug(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("debug", "Only engines or only the trainer, and dumps of their data.")
    group.add_argument(
        "--verbose",
        action="store_true",
        help="Log every weight push, Ray's client, and each model flag that follows from config.json.",
    )
    group.add_argument("--debug-rollout-only", action="store_true", help="Start only the engines; no training.")
    group.add_argument(
        "--debug-train-only",
        action=argparse.BooleanOptionalAction,
        help="Start only the trainer; no engines. Default: on with --load-debug-rollout-data, else off.",
    )
    group.add_argument(
        "--save-debug-rollout-data",
        type=file_path,
        metavar="TEMPLATE",
        help="File for the samples of each rollout; contains {rollout_id}.",
    )
    group.add_argument(
        "--load-debug-rollout-data",
        type=file_path,
        metavar="TEMPLATE",
        help="Train on saved samples instead of generating; implies --debug-train-only.",
    )
    group.add_argument(
        "--load-debug-rollout-data-subsample",
        type=positive_fraction,
        help="Fraction of the saved samples to use, in (0, 1].",
    )
    group.add_argument(
        "--load-forge-rollout-data",
        type=file_path,
        metavar="TEMPLATE",
        help="Replay saved samples while engines are running.",
    )
    group.add_argument(
        "--trust-debug-data",
        action="store_true",
        help="Allow objects of any class, such as a plug-in's, in replayed samples. The file can then run code.",
    )
    group.add_argument(
        "--save-debug-train-data",
        type=file_path,
        metavar="TEMPLATE",
        help="File for the train data of each rollout, from all ranks; contains {rollout_id}.",
    )
    group.add_argument(
        "--dump-details",
        type=file_path,
        metavar="DIR",
        help="Folder for both dumps: sets --save-debug-rollout-data and --save-debug-train-data.",
    )
    group.add_argument(
        "--custom-config-path",
        type=file_path,
        metavar="YAML",
        help="YAML file whose top-level keys become attributes of args and override flags; it may hold settings of "
        "plug-ins.",
    )


def _add_ci(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("CI", "Checks that end a run if a metric is wrong.")
    group.add_argument("--ci-test", action="store_true", help="Turn on the consistency checks of CI.")
    group.add_argument(
        "--ci-disable-kl-checker",
        action="store_true",
        help="Turn off the checks that ppo_kl, kl_loss and rollout/kl start at 0, which warn, or fail with --ci-test.",
    )
    group.add_argument(
        "--ci-train-rollout-logprob-abs-diff-threshold",
        type=non_negative_float,
        default=0.1,
        help="Largest mean |trainer - engine| difference of log-probs (nats) that --ci-test accepts.",
    )
    group.add_argument(
        "--ci-save-grad-norm", type=file_path, metavar="TEMPLATE", help="File to write gradient norms to."
    )
    group.add_argument(
        "--ci-load-grad-norm", type=file_path, metavar="TEMPLATE", help="File of gradient norms to compare with."
    )


def template_problem(flag: str, template: str, fields: set[str]) -> str | None:
    """Return the problem with the braces in a flag's file name; None if there is none."""
    allowed = " and ".join("{" + field + "}" for field in sorted(fields))
    try:
        parts = [part for part in string.Formatter().parse(template) if part[1] is not None]
        if {part[1] for part in parts} - fields:
            raise ValueError("another name")
        if any(re.fullmatch(r"\d{0,3}d?", part[2] or "") is None for part in parts):
            raise ValueError("another format than :06d")
        template.format(**dict.fromkeys(fields, 0))
    except (ValueError, LookupError) as error:
        return f"{flag} is {template!r}; in braces it may only have {allowed} ({error})."
    return None


def check_debug(args: Namespace) -> Iterator[str]:
    """Yield a message if nothing would run, and one per dump file whose braces cannot be filled, or used twice."""
    if args.debug_rollout_only and args.debug_train_only:
        asked = "--load-debug-rollout-data" if args.load_debug_rollout_data else "--debug-train-only"
        yield f"--debug-rollout-only and {asked} leave nothing to run; choose one of them."
    is_written_once = args.num_rollout == 1 and args.eval_interval is None
    for name, fields in _TEMPLATE_FIELDS.items():
        template = getattr(args, name)
        if template is None:
            continue
        flag = flag_of(name)
        if problem := template_problem(flag, template, fields):
            yield problem
        elif name in _WRITTEN_IN_EACH_ROLLOUT and not is_written_once and "{rollout_id" not in template:
            yield f"{flag} is {template!r}: every rollout would overwrite the one before; put {{rollout_id}} into it."
    if args.save_debug_rollout_data and args.save_debug_rollout_data == args.save_debug_train_data:
        yield (
            f"--save-debug-rollout-data and --save-debug-train-data are both {args.save_debug_rollout_data}; they "
            "would overwrite each other."
        )


def derive_dumps(args: Namespace) -> None:
    """Derive both dump files from --dump-details."""
    if args.dump_details is not None:
        args.save_debug_rollout_data = f"{args.dump_details}/rollout_data/{{rollout_id}}.pt"
        args.save_debug_train_data = f"{args.dump_details}/train_data/{{rollout_id}}.pt"


GROUP = FlagGroup(
    add_debug_arguments,
    derive=(derive_dumps,),
    check=(check_debug,),
    needs=(
        ("load_debug_rollout_data_subsample", "load_debug_rollout_data", "that says what is subsampled"),
        ("ci_save_grad_norm", "ci_test", "it belongs to the checks of that"),
        ("ci_load_grad_norm", "ci_test", "it belongs to the checks of that"),
    ),
)
