"""Checks of the flags of small Adams; the flags themselves are Megatron's and the core's."""

from __future__ import annotations

from argparse import Namespace

from slime.flags.group import FlagGroup
from slime.utils.errors import ConfigError


def check_moments(args: Namespace) -> None:
    """Refuse narrow moments that nothing would keep.

    Raises:
        ConfigError: with both dtypes.
    """
    from slime.backends.megatron_utils.flags.field_table import has_narrow_moments

    if not has_narrow_moments(args.exp_avg_dtype, args.exp_avg_sq_dtype):
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


GROUP = FlagGroup(complete=(check_moments,))
