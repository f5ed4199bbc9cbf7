"""What follows from ``--rollout-tools mcp:SERVER``; MCP servers have no flags."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec

from slime.flags.group import FlagGroup

PREFIX = "mcp:"


def derive_servers(args: Namespace) -> None:
    """Have the tools of MCP servers read."""
    args.tool_readers = args.tool_readers | {PREFIX: "slime.ext.mcp.server.read_tools"}


def check_servers(args: Namespace) -> Iterator[str]:
    """Yield a message where a server is named and the package is missing."""
    servers = [path for path in args.rollout_tools or () if path.startswith(PREFIX)]
    if servers and args.runs_here and find_spec("mcp") is None:
        yield f"--rollout-tools {servers[0]} needs the package mcp; pip install -e '.[mcp]'."


GROUP = FlagGroup(derive=(derive_servers,), check=(check_servers,))
