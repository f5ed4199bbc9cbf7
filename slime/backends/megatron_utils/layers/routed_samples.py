"""The samples behind the tokens that a router sees: which one each token belongs to, and its weight.

The balancing losses of a mixture of experts are means over tokens.  In a packed micro-batch a plain mean would count
padding, mix samples of one bin, and weigh a sample by how full its bin is.  Here every sample's balancing loss weighs
what the sample weighs in the policy loss, so that the result of a step does not depend on how it was packed:

    default:                        sum over samples of (share of its rollout's trained tokens) / rollouts of the step
    --calculate-per-token-loss:     sum over samples of (its trained tokens) / trained tokens of the step
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import mpu
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import packing_of
from slime.train_data.microbatch import pack_thd


@dataclass(frozen=True, slots=True)
class RoutedSamples:
    """The samples of one micro-batch.  S = samples, T = tokens on this context-parallel rank, padding included."""

    sample_of: Tensor
    """[T] int64: the sample of each token; S for padding."""
    lengths: Tensor
    """[S] float32: tokens of each sample, on all ranks together."""
    weights: Tensor
    """[S] float32: factors under which megatron-core's averages become the sums above."""

    def of_tensor_rank(self, num_tokens: int) -> Tensor:
        """Return ``sample_of`` [num_tokens] for what a router sees."""
        return part_of_tensor_rank(self.sample_of, num_tokens)


def part_of_tensor_rank(values_T: Tensor, num_tokens: int) -> Tensor:
    """Return [num_tokens] of values [T]: under sequence parallelism a router sees this tensor rank's part of the
    tokens.
    """
    if len(values_T) == num_tokens:
        return values_T
    return values_T.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]


def routers_need_samples(args: Namespace) -> bool:
    """Return True when the routers look at more than the single token: balancing losses, a moving bias, the load."""
    if not args.num_experts:
        return False
    coefficients = args.moe_aux_loss_coeff if isinstance(args.moe_aux_loss_coeff, list) else [args.moe_aux_loss_coeff]
    moves_bias = args.moe_router_enable_expert_bias and args.moe_router_bias_update_rate
    return bool(any(coefficients) or args.moe_z_loss_coeff or moves_bias or args.log_expert_load)


def attach_routed_samples(
    args: Namespace, batch: Mapping[str, Any], num_microbatches: int, step_global_batch_size: int
) -> None:
    """Let the packing of a batch of ``get_batch`` tell the routers its samples, where they need to know them.

    Args:
        batch: a micro-batch; its ``packed_seq_params`` get the attribute ``routed_samples``.
    """
    if not routers_need_samples(args):
        return
    lengths = batch["total_lengths"]
    device = batch["tokens"].device
    sample_of = pack_thd(
        [torch.full((length,), index, device=device) for index, length in enumerate(lengths)],
        packing_of(args),
        pad_id=len(lengths),
    ).tokens[0]
    trained = torch.stack([mask.sum() for mask in batch["loss_masks"]]).to(device, torch.float32)
    if args.calculate_per_token_loss:
        # Gradients are summed over ranks and divided by the trained tokens, which every context-parallel rank counts.
        weights = trained * mpu.get_context_parallel_world_size()
    else:
        # megatron-core averages over micro-batches and data-parallel ranks; what is wanted is a sum over rollouts.
        share = trained / batch["rollout_mask_sums"].to(device, torch.float32).clamp(min=1)
        weights = share * (num_microbatches * mpu.get_data_parallel_world_size() / step_global_batch_size)
    samples = RoutedSamples(sample_of, torch.tensor(lengths, dtype=torch.float32, device=device), weights)
    batch["packed_seq_params"].routed_samples = samples
