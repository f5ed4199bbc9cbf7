"""Builds configs from a namespace; the only place that reads ``args`` with defaults.

``args`` from ``parse_args`` is complete, and code that gets it reads ``args.x``.  Plug-ins and tests may call an entry
point with a partial namespace.  Such an entry point builds a ``FlagConfig``, in which missing attributes have the
defaults of their flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

AddFlags = Callable[[argparse.ArgumentParser], None]
_MISSING = object()


class FlagConfig:
    """Base of frozen dataclasses whose fields are attributes of ``args``, under the same names.

    ``class RewardConfig(FlagConfig, flags=(add_reward_arguments,))`` names the functions that declare the flags.
    """

    _flags: ClassVar[tuple[AddFlags, ...]] = ()

    def __init_subclass__(cls, flags: tuple[AddFlags, ...] = ()) -> None:
        cls._flags = flags

    @classmethod
    def of(cls, args: Any) -> Self:
        """Build the config from a namespace, complete or not.

        A missing attribute has the default of its flag, or that of the field if the flag has no default or there is
        no such flag (a plug-in's path, a flag of the engines).

        Raises:
            TypeError: neither ``args`` nor a flag nor the class gives a value for a field.
        """
        values = {}
        for name, default in _fields_of(cls):  # type: ignore[arg-type]
            value = getattr(args, name, _MISSING)
            if value is _MISSING:
                value = next((d[name] for group in cls._flags if name in (d := flag_defaults(group))), _MISSING)
                if value is None and default is not dataclasses.MISSING:
                    value = _MISSING  # a required flag
            if value is not _MISSING:
                values[name] = value
        return cls(**values)


@functools.cache
def _fields_of(config_class: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.default) for field in dataclasses.fields(config_class))


@functools.cache
def flag_defaults(group: AddFlags) -> Mapping[str, Any]:
    """Return attribute -> default for every flag that ``group`` declares."""
    parser = argparse.ArgumentParser(add_help=False)
    group(parser)
    return MappingProxyType(vars(parser.parse_args([])))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendFlags(FlagConfig):
    """Flags of the engines and of Megatron that slime's own checks read.

    Flags that were not parsed (the engines' in a run without engines) have the defaults of this class.
    """

    sglang_config: str | None = None
    sglang_context_length: int | None = None
    sglang_allow_auto_truncate: bool = False
    sglang_dp_size: int = 1
    sglang_load_format: str = "auto"
    prefill_num_servers: int | None = None
    sglang_enable_deepep_moe: bool = False
    sglang_moe_a2a_backend: str | None = None
    check_for_nan_in_loss_and_grad: bool = True
    context_parallel_size: int = 1
    allgather_cp: bool = False
    lr_warmup_iters: int = 0
    lr_decay_iters: int | None = None
    spec: list[str] | None = None
