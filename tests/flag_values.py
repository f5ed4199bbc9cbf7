"""Args as a command leaves them that gives no flag: tests say only what they need otherwise."""

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
    """The defaults of slime's own flags, nothing derived or checked, with these values over them."""
    return Namespace(**copy.deepcopy(_defaults()) | given)
