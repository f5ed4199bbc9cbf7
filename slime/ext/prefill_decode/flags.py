"""What engines start with where some prefill and others decode (``--prefill-num-servers``, ``--sglang-config``)."""

from __future__ import annotations

from argparse import Namespace

from slime.flags.group import FlagGroup

PLUGIN = "slime.ext.prefill_decode.sglang_plugin.register"


def derive_prefill_decode(args: Namespace) -> None:
    """Have the halves of a request know each other's end."""
    given = vars(args)  # a run without engines has no flags of theirs
    if given.get("prefill_num_servers") is not None or given.get("sglang_config") is not None:
        args.engine_plugins.append([PLUGIN, args.rollout_health_check_timeout])


GROUP = FlagGroup(derive=(derive_prefill_decode,))
