"""Flags of families with DeepSeek's sparse attention (GLM-5, GLM-5.2, DeepSeek-V3.2) against the HF config.

The sizes of the indexer come from config.json of ``--hf-checkpoint``.  megatron-core has flags for them, which a model
file need not give; they are filled in, so that a checkpoint records them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.backends.megatron_utils.flags.config_flags import flag_of
from slime.backends.megatron_utils.models import FAMILIES, family_of
from slime.utils.errors import ConfigError

_SPARSE = {f.sparse_architecture: f for f in FAMILIES.values() if f.sparse_architecture}
"""Families with sparse attention, which works over gathered, contiguous context-parallel parts, by architecture."""

_SIZES = {
    # key of config.json -> attribute of args
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}


def has_indexer(config: dict[str, Any]) -> bool:
    """Return True when a config.json is that of a model with sparse attention."""
    family = family_of(config)
    return family is not None and bool(family.sparse_architecture)


def indexer_sizes(config: dict[str, Any]) -> dict[str, int]:
    """Return heads, width of a head and keys per query, as attributes; empty for a model without an indexer."""
    family = family_of(config)
    if family is None or not family.sparse_architecture:
        return {}
    config = family.with_defaults(config)
    return {attribute: int(config[key]) for key, attribute in _SIZES.items()}


def derive_indexer(args: Namespace, config: dict[str, Any] | None) -> dict[str, Any]:
    """Return the sizes of the indexer that were not given.

    Raises:
        ConfigError: a flag says something else than the HF config.
    """
    sizes = indexer_sizes(config or {})
    for attribute, expected in sizes.items():
        given = vars(args)[attribute]
        if given not in (None, expected):
            raise ConfigError(
                f"{flag_of(attribute)} is {given}; config.json of --hf-checkpoint says {expected}; leave the flag out."
            )
    return sizes


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
