"""The cards that a run can be planned for."""

from __future__ import annotations

from dataclasses import dataclass

from slime.utils.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, and the host it usually comes in."""

    name: str
    memory: int
    """Bytes that CUDA reports."""
    bf16_flops: float
    """Dense, without sparsity."""
    host_memory: int
    """Of a node of eight, as it is usually sold."""


CARDS = {
    card.name: card
    for card in (
        Card("H100", int(79.1 * GIB), 989e12, 2048 * GIB),
        Card("H200", int(139.8 * GIB), 989e12, 2048 * GIB),
        Card("H800", int(79.1 * GIB), 989e12, 2048 * GIB),
        Card("H20", int(95.0 * GIB), 148e12, 2048 * GIB),
        Card("A100", int(79.1 * GIB), 312e12, 1024 * GIB),
        Card("B200", int(178.0 * GIB), 2250e12, 2048 * GIB),
    )
}


def find_card(name: str) -> Card:
    """The card called ``name``.

    Raises:
        ConfigError: it is not known.
    """
    if name.upper() not in CARDS:
        raise ConfigError(f"--gpu is {name!r}; known cards are {', '.join(CARDS)}.")
    return CARDS[name.upper()]
