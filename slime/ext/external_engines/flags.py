"""What follows from ``--rollout-external-engine-addrs``; the core declares the flag, because its GPU plan reads it."""

from __future__ import annotations

from argparse import Namespace

from slime.flags.group import FlagGroup
from slime.flags.security import Trust


def ask_external_engines(args: Namespace) -> None:
    """Ask external engines what they are; their GPUs are not ours to place anything on."""
    if args.rollout_external and not args.debug_train_only:
        from slime.ext.external_engines.discovery import discover

        infos = discover(args.rollout_external_engine_addrs, Trust.of(args).job_secret)
        args.rollout_external_engine_infos = infos
        args.rollout_num_engines = len(infos)
        args.rollout_num_gpus = sum(info.num_gpus for info in infos)


GROUP = FlagGroup(derive=(ask_external_engines,), once=(ask_external_engines,))
