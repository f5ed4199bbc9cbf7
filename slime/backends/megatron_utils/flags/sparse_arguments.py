"""Flags of families with DeepSeek's sparse attention (GLM-5, GLM-5.2, DeepSeek-V3.2): what does not go with it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import flag_of
from slime.backends.megatron_utils.models import FAMILIES, family_of
from slime.utils.errors import ConfigError

_SPARSE = {f.sparse_architecture: f for f in FAMILIES.values() if f.sparse_architecture}
"""Families with sparse attention, which works over gathered, contiguous context-parallel parts, by architecture."""


def has_indexer(config: dict[str, Any]) -> bool:
    """Return True when a config.json is that of a model with sparse attention."""
    family = family_of(config)
    return family is not None and bool(family.sparse_architecture)


def check_sparse_flags(args: Namespace) -> None:
    """Refuse megatron-core's own experiments with sparse attention, which would change nothing here.

    Raises:
        ConfigError: names the flag.
    """
    if args.experimental_attention_variant is not None:
        raise ConfigError(
            f"--experimental-attention-variant is {args.experimental_attention_variant!r}, which the layers here do "
            f"not have; for sparse attention give --spec {' or '.join(sorted({f.spec for f in _SPARSE.values()}))}."
        )
    for attribute in ("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"):
        if vars(args)[attribute]:
            raise ConfigError(
                f"{flag_of(attribute)} is {vars(args)[attribute]}; the indexer is not trained: the choice of keys has "
                "no gradient. Leave the flag out."
            )


def sparse_problems(args: Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Yield what does not go with the HF config: a frozen indexer that is not there, a wrong cut of the stream."""
    if args.freeze_indexer and not (has_indexer(config) or args.spec or args.custom_model_provider_path):
        yield (
            f"--freeze-indexer: the checkpoint, a {config.get('model_type')}, has no sparse attention and so no "
            "indexer; drop the flag."
        )
    if args.context_parallel_size == 1:
        return
    architectures = config.get("architectures") or []
    is_sparse = bool(set(architectures) & set(_SPARSE))
    if args.allgather_cp and not is_sparse:
        yield (
            f"--allgather-cp with --context-parallel-size {args.context_parallel_size}: the checkpoint is "
            f"{', '.join(architectures) or 'of unknown architecture'}; only {' and '.join(sorted(_SPARSE))} work "
            "that way; drop --allgather-cp."
        )
    if is_sparse and not args.allgather_cp:
        yield (
            f"--context-parallel-size is {args.context_parallel_size} without --allgather-cp; the sparse attention of "
            f"{', '.join(architectures)} needs contiguous parts of the stream; give --allgather-cp."
        )
