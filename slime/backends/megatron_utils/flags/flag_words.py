"""How an attribute of ``args`` is written on the command line."""

from __future__ import annotations


def flag_of(attribute: str) -> str:
    """``--num-layers`` of ``num_layers``."""
    return "--" + attribute.replace("_", "-")
