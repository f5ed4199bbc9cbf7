"""The losses by which clients train, under their names in the ``tinker`` package.

Each is a sum over tokens, never a mean.  With ``ratio = exp(log_prob - logprobs)`` and ``logprobs`` of the sampler:

    cross_entropy         - weights * log_prob
    importance_sampling   - ratio * A
    ppo                   - min(ratio * A, clamp(ratio, low, high) * A)
    cispo                 - stop_gradient(clamp(ratio, low, high)) * A * log_prob
    dro                   - (A * log_prob - beta / 2 * (log_prob - logprobs)^2)
    gspo                  ppo on the tokens of ``sequence_ratio_mask``, with exp of their mean log ratio as the ratio

Sources: PPO, arXiv:1707.06347; CISPO, arXiv:2506.13585, sec. 3.1; DRO, arXiv:2405.19107; GSPO, arXiv:2507.18071, sec.
4.1; defaults and names, the documentation of ``tinker`` 0.38.

Shapes: N = sequences; S = the targets of one sequence, [T] or [T, K].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.policy_losses.gspo import masked_sequence_mean
from slime.ext.training_api.backend import Datum, PassRequest, RequestRefused

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
CLIP_LOW, CLIP_HIGH, DRO_BETA = 0.8, 1.2, 0.05
"""Defaults of the thresholds of a ratio and of DRO's beta."""
TARGETS = "target_tokens"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss of one sequence."""

    compute: Callable[[Tensor, Inputs, Config], Tensor]
    """(log_prob_S with its gradient, inputs, config) -> [S], to be minimised."""
    needs: tuple[str, ...]
    """Inputs beside the targets, of their shape."""
    takes: tuple[str, ...] = ()
    """Inputs that may be left out."""
    config: tuple[str, ...] = ()


def cross_entropy(log_prob_S: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return ``-weights * log_prob``; without weights they are 1."""
    weights_S = inputs.get("weights")
    return -log_prob_S if weights_S is None else -weights_S * log_prob_S


def importance_sampling(log_prob_S: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return ``-ratio * A``."""
    return -_ratio(log_prob_S, inputs) * inputs["advantages"]


def ppo(log_prob_S: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return PPO's pessimistic surrogate with a ratio for each token."""
    return _pessimistic(_ratio(log_prob_S, inputs), inputs, config)


def cispo(log_prob_S: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return the policy gradient's surrogate with a constant, clamped ratio as its weight."""
    ratio_S = _ratio(log_prob_S, inputs).detach()
    return -_clamped(ratio_S, inputs, config) * inputs["advantages"] * log_prob_S


def dro(log_prob_S: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return the policy gradient's surrogate with a quadratic pull to the sampler."""
    distance_S = log_prob_S - inputs["logprobs"]
    return -(log_prob_S * inputs["advantages"] - 0.5 * config.get("beta", DRO_BETA) * distance_S.square())


def gspo(log_prob_S: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return PPO's surrogate with one ratio for the sequence; 0 outside of ``sequence_ratio_mask``."""
    mask_S = inputs["sequence_ratio_mask"]
    log_ratio = masked_sequence_mean([log_prob_S - inputs["logprobs"]], [mask_S])
    return mask_S * _pessimistic(log_ratio.exp().expand(log_prob_S.shape), inputs, config)


def _ratio(log_prob_S: Tensor, inputs: Inputs) -> Tensor:
    return (log_prob_S - inputs["logprobs"]).exp()


def _clamped(ratio_S: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low, high = (
        torch.as_tensor(inputs.get(name, config.get(name, default)), dtype=ratio_S.dtype, device=ratio_S.device)
        for name, default in ((_LOW, CLIP_LOW), (_HIGH, CLIP_HIGH))
    )
    return torch.clamp(ratio_S, low, high)


def _pessimistic(ratio_S: Tensor, inputs: Inputs, config: Config) -> Tensor:
    advantage_S = inputs["advantages"]
    return -torch.minimum(ratio_S * advantage_S, _clamped(ratio_S, inputs, config) * advantage_S)


_SAMPLED = ("logprobs", "advantages")
_CLIPS = (_LOW, _HIGH)
LOSSES = {
    "cross_entropy": Loss(compute=cross_entropy, needs=(), takes=("weights",)),
    "importance_sampling": Loss(compute=importance_sampling, needs=_SAMPLED),
    "ppo": Loss(compute=ppo, needs=_SAMPLED, takes=_CLIPS, config=_CLIPS),
    "cispo": Loss(compute=cispo, needs=_SAMPLED, takes=_CLIPS, config=_CLIPS),
    "dro": Loss(compute=dro, needs=_SAMPLED, config=("beta",)),
    "gspo": Loss(compute=gspo, needs=(*_SAMPLED, "sequence_ratio_mask"), takes=_CLIPS, config=_CLIPS),
}
NOT_SERVED = {
    "stable_reinforce": "its formula is not published",
    "custom": "it would run a client's code here; forward_backward_custom with a function runs it there",
}


def check_pass(request: PassRequest, *, vocab_size: int, max_tokens: int) -> None:
    """Refuse a pass whose loss, shapes or numbers cannot be.

    Args:
        request: of a client.
        vocab_size: tokens of the model.
        max_tokens: of a sequence.

    Raises:
        RequestRefused: names the datum and the field.
    """
    loss = LOSSES.get(request.loss)
    if loss is None:
        why = f": {NOT_SERVED[request.loss]}" if request.loss in NOT_SERVED else ""
        raise RequestRefused(f"loss_fn is {request.loss!r}, which is not served{why}; use {', '.join(LOSSES)}.")
    if unknown := sorted(set(request.loss_config) - set(loss.config)):
        raise RequestRefused(
            f"loss_fn_config has {unknown[0]!r}; {request.loss} takes {', '.join(loss.config) or 'nothing'}."
        )
    for key, value in request.loss_config.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise RequestRefused(f"loss_fn_config has {key} {value!r}; it must be a finite number.")
    if not request.data:
        raise RequestRefused("data is empty; a pass needs at least one datum.")
    for index, datum in enumerate(request.data):
        _check_datum(datum, loss, f"data[{index}]", vocab_size=vocab_size, max_tokens=max_tokens)


def _check_datum(datum: Datum, loss: Loss, where: str, *, vocab_size: int, max_tokens: int) -> None:
    length, inputs = len(datum.tokens), f"{where}.loss_fn_inputs"
    if not 0 < length <= max_tokens:
        raise RequestRefused(f"{where}.model_input has {length} tokens; it must have 1 to {max_tokens}.")
    known = (TARGETS, *loss.needs, *loss.takes)
    if unknown := sorted(set(datum.inputs) - set(known)):
        raise RequestRefused(f"{inputs} has {unknown[0]!r}; this loss takes {', '.join(known)}.")
    if missing := [name for name in (TARGETS, *loss.needs) if name not in datum.inputs]:
        raise RequestRefused(f"{inputs} has no {missing[0]!r}, which this loss needs.")
    targets = datum.inputs[TARGETS]
    if targets.ndim not in (1, 2) or targets.shape[0] != length or not targets.size:
        raise RequestRefused(
            f"{inputs}.{TARGETS} has the shape {list(targets.shape)}; it must be [{length}], or [{length}, K]: one or "
            "K for each token of model_input."
        )
    for field, tokens in (("model_input", np.asarray(datum.tokens)), (f"loss_fn_inputs.{TARGETS}", targets)):
        if not np.issubdtype(tokens.dtype, np.integer) or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise RequestRefused(f"{where}.{field} has a token that is not one of 0 to {vocab_size - 1}.")
    for name, values in datum.inputs.items():
        if values.shape != targets.shape:
            raise RequestRefused(
                f"{inputs}.{name} has the shape {list(values.shape)}; it must have the shape of target_tokens, "
                f"{list(targets.shape)}."
            )
        if name != TARGETS and not np.isfinite(values).all():
            raise RequestRefused(f"{inputs}.{name} has a number that is not finite.")
