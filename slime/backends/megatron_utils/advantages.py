"""Computes advantages and returns from the columns of a rank's rollout, with the ``--advantage-estimator``.

The formulas are in ``slime.algorithms.advantages``; this module chooses their columns and handles context parallelism.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
from megatron.core import mpu
from torch import Tensor

from slime.algorithms.advantages import AdvantageConfig, AdvantageInputs, get_estimator
from slime.algorithms.advantages.whitening import whiten
from slime.algorithms.kl import approx_kl
from slime.backends.megatron_utils.cp_utils import local_responses, whole_responses
from slime.backends.megatron_utils.data import PER_TOKEN_COLUMNS
from slime.backends.megatron_utils.guide import Guide
from slime.train_data.device_batch import DeviceBatch
from slime.utils.errors import ConfigError, DataError
from slime.utils.misc import call_hook
from slime.utils.types import RolloutBatch


@torch.no_grad()
def compute_advantages_and_returns(
    args: Namespace, rollout_data: RolloutBatch, guides: Sequence[Guide] | None = None
) -> None:
    """Set ``kl``, ``advantages`` and ``returns`` in ``rollout_data``: [r] per sample, local to the context-parallel
    rank.

    Only the last pipeline stage has the log-probs; other stages return early.

    Args:
        guides: the guides of the run, each of which may change the advantages.

    Raises:
        ConfigError: a flag asks for guides, but ``guides`` is None.
        DataError: the KL penalty or the estimator needs a column that is missing.
    """
    if guides is None and (terms := vars(args).get("advantage_terms")):
        raise ConfigError(
            f"{'; '.join(terms)}. compute_advantages_and_returns was called without guides, which add it: pass "
            "[guide(args) for guide in slime.ray.parts.load_all(slime.compose.parts(args).guides)], or drop the flag."
        )
    if not mpu.is_pipeline_last_stage():
        return
    data = rollout_data if isinstance(rollout_data, DeviceBatch) else DeviceBatch(rollout_data)
    masks = local_responses(data.loss_masks, data.total_lengths, data.response_lengths)
    given = vars(args).get  # a plug-in's own args may lack flags that its estimator does not use
    ours = data.rollout_log_probs if given("use_rollout_logprobs") else data.log_probs
    kl = _token_kl(ours, data.ref_log_probs, masks, coef=args.kl_coef, kind=given("kl_loss_type", "k1"))
    data.kl = _zero_nonfinite_untrained(kl, masks)
    if path := args.custom_advantage_function_path:
        call_hook("--custom-advantage-function-path", path, args, data)
    else:
        config = AdvantageConfig(kl_coef=args.kl_coef, gamma=args.gamma, lambd=args.lambd)
        data.advantages, data.returns = _estimate(args.advantage_estimator, config, data, masks)
    for guide in guides or ():
        guide.pull(data, ours)
    if args.normalize_advantages:
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        data.advantages = whiten(data.advantages, masks, group=group)
    rollout_data.update(data)  # a plug-in may pass its own dict


def _zero_nonfinite_untrained(column_N: list[Tensor], mask_N: list[Tensor]) -> list[Tensor]:
    """Replace non-finite values of untrained tokens with 0: sums over time would spread them to trained tokens."""
    return [
        torch.where((mask != 0) | values.isfinite(), values, 0.0)
        for values, mask in zip(column_N, mask_N, strict=True)
    ]


def _token_kl(
    ours: list[Tensor] | None, reference: list[Tensor] | None, masks: list[Tensor], *, coef: float, kind: str
) -> list[Tensor]:
    """Return the KL from the reference, [r] per sample; zeros if ``--kl-coef`` is 0."""
    if coef == 0:
        return [torch.zeros_like(mask, dtype=torch.float32) for mask in masks]
    if ours is None or reference is None:
        raise DataError(
            f"--kl-coef is {coef}, but there are no {'reference ' if reference is None else ''}log-probs; "
            "check --ref-load and --disable-compute-advantages-and-returns"
        )
    return [approx_kl(log_prob, ref, kind) for log_prob, ref in zip(ours, reference, strict=True)]


def _estimate(
    name: str, config: AdvantageConfig, data: DeviceBatch, masks: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    estimator = get_estimator(name)
    lengths = data.total_lengths, data.response_lengths
    values = data.get("values")
    values = None if values is None else _zero_nonfinite_untrained(values, masks)
    if estimator.needs_values and values is None:
        raise DataError(f"--advantage-estimator {name} needs the critic's values; there are none")
    missing = [column for column in estimator.columns if data.get(column) is None]
    if missing:
        raise DataError(
            f"--advantage-estimator {name} needs {', '.join(missing)}, and the samples have none; "
            "see slime/train_data/columns.py, or --custom-convert-samples-to-train-data-path"
        )
    is_gathered = estimator.needs_whole_responses and mpu.get_context_parallel_world_size() > 1

    def whole(column: list[Tensor]) -> list[Tensor]:
        return whole_responses(column, *lengths) if is_gathered else column

    advantages, returns = estimator.compute(
        AdvantageInputs(
            rewards_N=data.rewards,
            kl_N=whole(data.kl),
            mask_N=data.loss_masks if is_gathered else masks,
            values_N=None if values is None else whole(values),
            columns={
                key: whole(_zero_nonfinite_untrained(data[key], masks)) if key in PER_TOKEN_COLUMNS else data[key]
                for key in estimator.columns
            },
        ),
        config,
    )
    if is_gathered:
        advantages, returns = local_responses(advantages, *lengths), local_responses(returns, *lengths)
    return advantages, returns
