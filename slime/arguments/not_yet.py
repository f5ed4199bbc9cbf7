"""Flags whose feature is not here yet: using one is an error, never a silent no-op.

The table shrinks as features arrive; tests/contracts/test_flags.py proves that every other flag has a reader.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A feature that a flag asks for in vain."""

    reason: str
    """What does not exist, as the end of "..., because"."""
    used: Callable[[Any], bool] = bool
    """True for the values that ask for it."""


def _is_given(value: Any) -> bool:
    return value is not None


NO_ALIGNMENT = "DeepGEMM is not used in the trainer's forward pass yet"

NOT_YET: dict[str, Missing] = {
    "rollout_data_transport": Missing(reason="NIXL is not supported yet", used=lambda value: value == "nixl"),
    "qwen_gdn_backend": Missing(reason="delta nets run by fla or plain torch", used=lambda value: value != "fla"),
    "memory_recorder": Missing(reason="memory is recorded by torch only, so far", used=lambda value: value != "torch"),
    "megatron_deepgemm_forward_layers": Missing(reason=NO_ALIGNMENT, used=_is_given),
    "megatron_deepgemm_forward_modules": Missing(reason=NO_ALIGNMENT, used=_is_given),
    "megatron_deepgemm_moe_forward_layers": Missing(reason=NO_ALIGNMENT, used=_is_given),
    "megatron_deepgemm_moe_forward_modules": Missing(reason=NO_ALIGNMENT, used=_is_given),
}
"""Attribute of args -> what is missing."""


def refuse_missing_features(args: Namespace) -> None:
    """Raise when a flag asks for a feature that does not exist yet.

    Raises:
        ConfigError: names every such flag with its value.
    """
    lines = [
        f"--{name.replace('_', '-')} is {getattr(args, name)!r}: {missing.reason}. Leave the flag out."
        for name, missing in NOT_YET.items()
        if missing.used(getattr(args, name))
    ]
    if lines:
        raise ConfigError("\n".join(lines))
