"""What follows from ``--rollout-tools mcp:SERVER``; MCP servers have no flags."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import parse_qsl, urlsplit

from slime.flags.group import FlagGroup
from slime.utils.redaction import is_secret

PREFIX = "mcp:"
KEY_LENGTH = 16
"""Letters from which on a word with a digit, in the path or the query of an address, counts as a key."""


def derive_servers(args: Namespace) -> None:
    """Have the tools of MCP servers read, and the keys in their addresses kept out of every text."""
    args.tool_readers = args.tool_readers | {PREFIX: "slime.ext.mcp.server.read_tools"}
    words = [path.removeprefix(PREFIX).strip() for path in args.rollout_tools or () if path.startswith(PREFIX)]
    args.rollout_tool_secrets = [key for word in words for url in _addresses_in(word) for key in keys_in(url)]


def _addresses_in(word: str) -> list[str]:
    if word.startswith(("http://", "https://")):
        return [word]
    try:
        parts = shlex.split(word)
    except ValueError:  # no command, as who starts it will say
        parts = re.split(r"[\s'\"]+", word)
    return [part for part in parts if "://" in part]


def keys_in(url: str) -> list[str]:
    """Return what looks like a key in an address, as it stands there and decoded.

    Services put keys into paths too, or give them any name.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # no address, as who connects to it will say
        return []
    written = [(name, value) for name, _, value in (pair.partition("=") for pair in parts.query.split("&"))]
    named = [*written, *parse_qsl(parts.query), *(("", one) for one in parts.path.split("/"))]
    found = [
        value
        for name, value in named
        if (name and is_secret(name)) or (len(value) >= KEY_LENGTH and any(letter.isdigit() for letter in value))
    ]
    return list(dict.fromkeys(found))


def check_servers(args: Namespace) -> Iterator[str]:
    """Yield a message where a server is named and the package is missing."""
    servers = [path for path in args.rollout_tools or () if path.startswith(PREFIX)]
    if servers and args.runs_here and find_spec("mcp") is None:
        yield f"--rollout-tools {servers[0]} needs the package mcp; pip install -e '.[mcp]'."


GROUP = FlagGroup(derive=(derive_servers,), check=(check_servers,))
