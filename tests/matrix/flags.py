"""The model flags of a tiny checkpoint, derived from its ``config.json``."""

from __future__ import annotations

from pathlib import Path

from slime.backends.megatron_utils.flags.hf_config_check import config_says, read_hf_config, words_of
from slime.backends.megatron_utils.models import family_of


def model_flags(folder: Path, *more: str) -> list[str]:
    """A command's flags for the model of ``folder``, with little vocabulary padding, and ``more``."""
    config = read_hf_config(str(folder))
    family = family_of(config)
    flags = ["--make-vocab-size-divisible-by", "8"]
    for flag in config_says(config)[0].values():
        flags += words_of(flag.attribute, flag.value) if flag.value is not None else []
    if family is not None and family.spec and not family.is_spec_optional:
        flags += ["--spec", *family.spec.split()]
    return [*flags, *more]
