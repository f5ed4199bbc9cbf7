"""Flags of small Adams; those of low-precision moments are Megatron's."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator

from slime.flags.group import FlagGroup
from slime.utils.errors import ConfigError


def add_adam_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the small Adam group to ``parser``."""
    group = parser.add_argument_group("small Adam", "Adam with less than two fp32 moments of every parameter.")
    group.add_argument(
        "--use-stateless-adam", action="store_true", help="Adam without stored moments, which saves their memory."
    )


def check_save(args: Namespace) -> Iterator[str]:
    """Yield a message for a checkpoint that is to hold what no step keeps."""
    if args.use_stateless_adam and args.save is not None and not args.no_save_optim:
        yield "--use-stateless-adam keeps nothing that a checkpoint could hold; add --no-save-optim."


def complete_moments(args: Namespace) -> None:
    """Say whether a moment is kept in less than fp32; refuse narrow moments that nothing would keep.

    Raises:
        ConfigError: with both dtypes.
    """
    from slime.backends.megatron_utils.flags.field_table import has_narrow_moments

    args.narrow_moments = has_narrow_moments(args.exp_avg_dtype, args.exp_avg_sq_dtype)
    if not args.narrow_moments:
        return
    if not args.use_precision_aware_optimizer:
        reason = "moments below fp32 need --use-precision-aware-optimizer; add it"
    elif args.optimizer_cpu_offload:
        reason = "moments on the host are fp32; drop these, or --optimizer-cpu-offload"
    elif args.use_stateless_adam:
        reason = "--use-stateless-adam has no moments; drop one"
    else:
        return
    given = f"--exp-avg-dtype {args.exp_avg_dtype}, --exp-avg-sq-dtype {args.exp_avg_sq_dtype}"
    raise ConfigError(f"{given}: {reason}.")


_NONE = "the second has none"
GROUP = FlagGroup(
    add_adam_arguments,
    check=(check_save,),
    complete=(complete_moments,),
    excludes=(
        ("reset_optimizer_states", "use_stateless_adam", f"the first is about moments, and {_NONE}"),
        ("optimizer_cpu_offload", "use_stateless_adam", f"the first moves Adam's moments, and {_NONE}"),
    ),
)
