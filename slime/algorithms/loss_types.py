"""The kinds of loss that an optimizer step can minimise, by ``--loss-type``.

What they need is said here, where flags can see it without Megatron; the functions of the same names are in
``slime.backends.megatron_utils.loss``.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.algorithms.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class LossType:
    """Properties of a loss."""

    summary: str
    needs_advantages: bool = False
    """It cannot do without ``compute_advantages_and_returns``."""
    of_critic: bool = False
    """Chosen by the role and not by the flag."""


LOSS_TYPES: Registry[LossType] = Registry(
    "--loss-type",
    {
        "policy_loss": LossType(summary="the surrogate of the advantage estimator", needs_advantages=True),
        "value_loss": LossType(summary="the critic's regression", needs_advantages=True, of_critic=True),
        "sft_loss": LossType(summary="negative log-likelihood of the response"),
        "custom_loss": LossType(summary="--custom-loss-function-path"),
    },
)

ACTOR_LOSS_TYPES = tuple(name for name, loss in LOSS_TYPES.items() if not loss.of_critic)
"""The values of ``--loss-type``."""
