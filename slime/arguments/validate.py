"""Checks of the complete args; nothing is changed here."""

from __future__ import annotations

from argparse import Namespace


def validate(args: Namespace) -> None:
    """Raise for the first thing that cannot work."""
