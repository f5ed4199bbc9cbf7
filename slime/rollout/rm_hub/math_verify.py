r"""``--rm-type math_verify``: Hugging Face's math-verify decides, in place of the two normal forms of ``math_utils``.

More generous than ``--rm-type math``: unreduced fractions (``\frac{2}{4}``), powers (``10^{2}``), sets and intervals
in other spellings count as equal.  It has a type of its own, so that rewards of the other types stay what they were.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from slime.rollout.rm_hub.math_utils import extract_answer, truth_of_label
from slime.rollout.rm_hub.symbolic import is_same_by_math_verify
from slime.utils.errors import ConfigError

HOW_TO_INSTALL = "--rm-type math_verify needs the package math-verify: pip install 'math-verify[antlr4_13_2]'"


def is_installed() -> bool:
    """Whether math-verify can be imported."""
    return importlib.util.find_spec("math_verify") is not None


def compute_math_verify_reward(response: str, label: Any) -> int:
    """1 when the last box of the response holds the label, else 0."""
    if not is_installed():
        raise ConfigError(HOW_TO_INSTALL)
    truth, given = truth_of_label(label), extract_answer(response)
    if truth is None or given is None:
        return 0
    return int(given == truth or is_same_by_math_verify(f"${truth}$", f"${given}$"))
