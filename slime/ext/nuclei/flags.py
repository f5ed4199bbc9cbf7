"""What engines are started with so that they return nuclei (``--rollout-top-p``, and requests that ask for them)."""

from __future__ import annotations

from argparse import Namespace

from slime.flags.group import FlagGroup

PLUGIN = "slime.ext.nuclei.sglang_plugin.register"


def derive_nuclei(args: Namespace) -> None:
    """Have every engine return nuclei to requests that ask: a plug-in may, whatever the run's own top-p is."""
    args.engine_plugins.append([PLUGIN])


GROUP = FlagGroup(derive=(derive_nuclei,))
