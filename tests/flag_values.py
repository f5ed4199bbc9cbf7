"""Args of a command without flags: tests only add the values they need."""

from __future__ import annotations

import copy
import functools
from argparse import Namespace
from typing import Any

from slime.flags.parse import GROUPS
from slime.flags.parser import Parser


@functools.cache
def _defaults() -> dict[str, Any]:
    return vars(Parser(GROUPS).parse_args([]))


def args_with(**given: Any) -> Namespace:
    """The defaults of slime's own flags, without deriving or checking anything, overridden by these values."""
    return Namespace(**copy.deepcopy(_defaults()) | given)
