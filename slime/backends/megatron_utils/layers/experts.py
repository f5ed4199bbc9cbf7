"""The stacked experts of one layer: one parameter per matrix holds all experts of this rank.

They replace megatron-core's ``TEGroupedMLP`` (which needs TransformerEngine) and ``SequentialMLP`` (one module per
expert) as the ``experts`` of its ``MoELayer``, and write checkpoints under the names that both of them use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform

ShardedState = dict[str, ShardedTensor | ShardedTensorFactory]
Offsets = tuple[tuple[int, int, int], ...]


class StackedLinear(torch.nn.Module):
    """One matrix of every expert of this rank: ``weight`` [E_local, out, in], sharded along one of the last two axes.

    With biases it also holds ``bias`` [E_local, out], which :class:`StackedExperts` adds.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        split_axis: int,
        is_gated: bool,
        init_method: Callable[[Tensor], Any],
    ) -> None:
        """Create and initialize the parameters.

        Args:
            split_axis: 1 shards the outputs over the expert-tensor-parallel ranks, 2 the inputs.
            is_gated: the outputs are gate, then up projections; each rank holds its part of both.
            init_method: fills an [out, in] matrix.
        """
        super().__init__()
        self.use_grouped_product = config.moe_grouped_gemm
        self.is_gated = is_gated
        self.split_axis = split_axis
        self.groups = groups
        parts = groups.expt_tp.size()
        shape = [num_experts, out_features, in_features]
        shape[split_axis] = divide(shape[split_axis], parts)
        factory = cpu_platform.of_new_parameters(config)
        weight: Any = torch.nn.Parameter(torch.empty(shape, **factory))
        set_tensor_model_parallel_attributes(weight, True, split_axis, 2 if is_gated else 1)
        # Gradients of experts are averaged over the ranks that hold the same experts.  They are the ranks of dense
        # parameters only if both are sharded alike: with a smaller expert-tensor-parallel size, several
        # tensor-parallel ranks hold the same experts.
        weight.allreduce = groups.ep.size() == 1 and groups.expt_tp.size() == config.tensor_model_parallel_size
        weight.is_stacked_experts = True
        self.weight: torch.nn.Parameter = weight
        bias: Any = None
        if config.add_bias_linear:
            bias = torch.nn.Parameter(torch.zeros(num_experts, out_features, **factory))
            # Marked as sharded: megatron-core counts unsharded parameters only on the first tensor-parallel rank.
            set_tensor_model_parallel_attributes(bias, True, 1, 2 if is_gated else 1)
            bias.allreduce, bias.is_stacked_experts = weight.allreduce, True
        self.bias: torch.nn.Parameter | None
        self.register_parameter("bias", bias)
        if not config.perform_initialization:
            return
        if config.use_cpu_initialization:
            self._initialize_whole(out_features, in_features, init_method)
        else:
            # The tracker's state differs between ranks.
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()), torch.no_grad():
                for matrix in self.weight:
                    init_method(matrix)

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Map [T, in] sorted by expert to [T, out]."""
        return grouped_linear(x, self.weight, tokens_per_expert, use_grouped_product=self.use_grouped_product)

    @torch.no_grad()
    def _initialize_whole(self, out_features: int, in_features: int, init_method: Callable[[Tensor], Any]) -> None:
        """Initialize each expert's whole matrix from its own seed, so that it is the same in every parallel layout."""
        seed = int(torch.randint(2**40, ()))  # equal on all these ranks, whose generators have the same state
        first = self.groups.ep.rank() * self.weight.size(0)
        rank, parts = self.groups.expt_tp.rank(), self.groups.expt_tp.size()
        for index, matrix in enumerate(self.weight):
            with torch.random.fork_rng(devices=[]):
                # torch.manual_seed would also seed the GPUs' generators, which fork_rng does not restore here.
                torch.default_generator.manual_seed(seed + first + index)
                whole = torch.empty(out_features, in_features, dtype=torch.float32)
                init_method(whole)
            halves = whole.chunk(2) if self.is_gated else (whole,)
            matrix.copy_(torch.cat([half.chunk(parts, dim=self.split_axis - 1)[rank] for half in halves]))

    def add_bias(self, y: Tensor, tokens_per_expert: Tensor, probs: Tensor | None = None) -> Tensor:
        """Return y [T, out] plus the bias of each row's expert times ``probs`` [T, 1]; without biases return y.

        Computed as a matrix product with one-hot rows, whose gradient is summed in fp32 in a fixed order.
        """
        if self.bias is None:
            return y
        one_hot = torch.eye(len(self.bias), dtype=y.dtype, device=y.device)
        counts = tokens_per_expert.to(y.device, non_blocking=True)
        chosen_TE = one_hot.repeat_interleave(counts, dim=0, output_size=len(y))
        return torch.addmm(y, chosen_TE if probs is None else chosen_TE * probs.to(y.dtype), self.bias)

    def sharded_entries(self, prefix: str, sharded_offsets: Offsets) -> ShardedState:
        """Return the parameters as this rank's part of the tensors [.., experts, out, in] and, with biases,
        [.., experts, out] of a checkpoint, ``{prefix}weight`` and ``{prefix}bias``.

        ``sharded_offsets`` (the layer, if layers are stacked too) describe axes in front of these.
        """
        front = len(sharded_offsets)
        expert_axis = (front, self.groups.ep.rank(), self.groups.ep.size())
        rank, parts = self.groups.expt_tp.rank(), self.groups.expt_tp.size()

        def entry(key: str, tensor: Tensor, replica_id: ReplicaId, *cut: tuple[int, int, int]) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                key, tensor, *sharded_offsets, expert_axis, *cut, replica_id=replica_id, prepend_axis_num=front
            )

        # (pipeline, tensor, data): only the first data-parallel replica is written.
        replica_id = (0, 0, self.groups.expt_dp.rank())
        weight = self._parameters["weight"]  # self.weight may be a rounded copy
        assert weight is not None
        key, cut = f"{prefix}weight", (front + self.split_axis, rank, parts)
        state: ShardedState = {}
        if self.is_gated:
            state["weight"] = gate_up_entry(key, weight, replica_id, cut, entry, dim=1)
        else:
            state["weight"] = entry(key, weight, replica_id, cut)
        if self.bias is not None:
            state["bias"] = entry(f"{prefix}bias", self.bias, replica_id)
        return state


def gate_up_entry(
    key: str,
    tensor: Tensor,
    replica_id: ReplicaId,
    cut: tuple[int, int, int],
    entry: Callable[..., ShardedTensor],
    *,
    dim: int,
) -> ShardedTensorFactory:
    """Return the checkpoint entry of a tensor that concatenates gate and up projections along ``dim``, each sharded
    over the ranks.

    ``cut`` is (axis on disk, rank, number of ranks); ``entry`` builds the entry of one half from key, tensor, replica
    and cut.
    """
    axis, rank, parts = cut

    def split(key: str, tensor: Tensor, replica_id: ReplicaId, flattened_range: slice | None) -> ShardedState:
        gate, up = tensor.chunk(2, dim=dim)
        return {
            "gate": entry(key, gate, replica_id, (axis, rank, 2 * parts)),
            "up": entry(key, up, replica_id, (axis, parts + rank, 2 * parts)),
        }

    def join(halves: dict[str, Tensor]) -> Tensor:
        return torch.cat([halves["gate"], halves["up"]], dim=dim)

    return ShardedTensorFactory(key, tensor, split, join, replica_id)


class StackedExperts(MegatronModule):
    """Two matrices per expert with an activation in between; outputs are weighted by the router's probabilities."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Build the experts.  The signature is megatron-core's; ``submodules`` is ignored."""
        super().__init__(config=config)
        assert pg_collection is not None
        # Each rank that shares an expert would add the bias; the check of the flags reports this to users.
        assert not config.add_bias_linear or pg_collection.expt_tp.size() == 1
        self.num_local_experts = num_local_experts
        hidden_size, ffn = config.hidden_size, config.moe_ffn_hidden_size
        assert ffn is not None
        self.linear_fc1 = StackedLinear(
            config,
            pg_collection,
            num_local_experts,
            hidden_size,
            2 * ffn if config.gated_linear_unit else ffn,
            split_axis=1,
            is_gated=config.gated_linear_unit,
            init_method=config.init_method,
        )
        self.linear_fc2 = StackedLinear(
            config,
            pg_collection,
            num_local_experts,
            ffn,
            hidden_size,
            split_axis=2,
            is_gated=False,
            init_method=config.output_layer_init_method,
        )
        self.recomputes_activation = config.recompute_granularity == "selective" and "moe_act" in (
            config.recompute_modules or ()
        )

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Run every expert over its tokens.

        Args:
            tokens: [T, hidden], sorted by expert.
            tokens_per_expert: [E_local] counts, on the device or on the host.
            probs: [T] weight of each row.

        Returns:
            [T, hidden], and None in place of the bias that megatron-core's experts return.  With expert tensor
            parallelism these are partial sums, which the token dispatcher adds up.
        """
        probs = probs.unsqueeze(-1)
        if self.config.moe_apply_probs_on_input:
            tokens, probs = (tokens * probs).to(tokens.dtype), torch.ones_like(probs)
        inner = self.linear_fc1(tokens, tokens_per_expert)
        inner = self.linear_fc1.add_bias(inner, tokens_per_expert)
        if self.recomputes_activation:
            checkpoint = tensor_parallel.CheckpointWithoutOutput()
            activated = checkpoint.checkpoint(self.activation, inner, probs)
            output = self.linear_fc2(activated, tokens_per_expert)
            checkpoint.discard_output_and_register_recompute(output)
        else:
            output = self.linear_fc2(self.activation(inner, probs), tokens_per_expert)
        return self.linear_fc2.add_bias(output, tokens_per_expert, probs), None

    def activation(self, x: Tensor, probs: Tensor) -> Tensor:
        """Map [T, gate and up] to [T, ffn], times the probabilities [T, 1], in the dtype of ``x``."""
        config = self.config
        is_plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0.0
        if config.gated_linear_unit and config.activation_func is F.silu and is_plain:
            # Saves only its input for the backward pass, and multiplies in the dtype of the probabilities (fp32).
            return weighted_bias_swiglu_impl(x, None, probs, config.activation_func_fp8_input_store)
        if config.gated_linear_unit:
            gate, up = x.chunk(2, dim=-1)
            if (limit := config.activation_func_clamp_value) is not None:
                gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
            activated = config.activation_func(gate) * (up + config.glu_linear_offset)
        else:
            activated = config.activation_func(x)
        return (activated * probs).to(x.dtype)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are not delayed."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedState:
        """Return the parameters as ``{prefix}experts.linear_fc{1,2}.weight``, global shape [.., experts, out, in], and
        ``.bias``, [.., experts, out].
        """
        state: ShardedState = {}
        for name, linear in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2)):
            entries = linear.sharded_entries(f"{prefix}experts.{name}.", sharded_offsets)
            state |= {f"{prefix}{name}.{of}": entry for of, entry in entries.items()}
        return state


# One matrix product per expert over tokens sorted by expert, forward and backward.
#
#     y[rows of expert e] = x[rows of expert e] @ weight[e].T
#
# Two implementations give the same numbers: torch's grouped matrix product (one kernel, CUDA, bf16; the counts stay on
# the device) and a loop over the experts (everywhere).


_ALIGNMENT = 16
"""The grouped kernel needs rows whose size is a multiple of this many bytes."""


def has_grouped_product(x: Tensor, weight: Tensor) -> bool:
    """Return True if torch's grouped matrix product supports these operands (x [T, in], weight [E, out, in])."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or not x.size(0):
        return False
    row_bytes = (size * x.element_size() for size in weight.shape[1:])
    return all(size % _ALIGNMENT == 0 for size in row_bytes)


def grouped_linear(x: Tensor, weight: Tensor, tokens_per_expert: Tensor, *, use_grouped_product: bool) -> Tensor:
    """Apply each expert's matrix to its own tokens.

    Args:
        x: [T, in], sorted by expert.
        weight: [E, out, in].
        tokens_per_expert: [E] integers that sum to T, on the device or on the host; zeros are allowed.
        use_grouped_product: use one kernel if torch supports these operands; otherwise loop, which needs the counts on
            the host.

    Returns:
        [T, out].
    """
    if use_grouped_product and has_grouped_product(x, weight):
        ends = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        return _GroupedProduct.apply(x, weight, ends)
    return _LoopedProduct.apply(x, weight, tokens_per_expert.tolist())


class _GroupedProduct(torch.autograd.Function):
    """``F.grouped_mm`` and its two gradients, which are also grouped products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()  # the kernel needs unit strides, which an expanded gradient does not have
        grad_x = F.grouped_mm(grad, weight, offs=ends) if ctx.needs_input_grad[0] else None
        # The sum over each expert's tokens: both operands are split along T.  Experts without tokens get zeros.
        grad_weight = F.grouped_mm(grad.t(), x, offs=ends) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class _LoopedProduct(torch.autograd.Function):
    """One matrix product per expert, written directly into the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        y = x.new_empty(x.size(0), weight.size(1))
        for rows, out, matrix in zip(x.split(counts), y.split(counts), weight, strict=True):
            torch.mm(rows, matrix.t(), out=out)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        pieces = grad.split(ctx.counts)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x)
            for piece, out, matrix in zip(pieces, grad_x.split(ctx.counts), weight, strict=True):
                torch.mm(piece, matrix, out=out)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
            for piece, rows, out in zip(pieces, x.split(ctx.counts), grad_weight, strict=True):
                torch.mm(piece.t(), rows, out=out)  # a sum over no tokens is zero
        return grad_x, grad_weight, None
