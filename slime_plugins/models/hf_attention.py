"""Base class for attention that a Hugging Face module computes, in every parallel layout.

A subclass creates the module in ``__init__`` and calls it in ``hf_forward``; a ``--spec`` function replaces a layer's
self-attention with the subclass, with ``params={"args": args}``.  The module gets whole sequences: every tensor- and
context-parallel rank gathers the hidden states, computes the same, and keeps its own tokens.  This needs no parallel
code, but repeats the computation on every such rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import AutoConfig

from slime.backends.megatron_utils.layers.rotary import natural_order
from slime.flags.security import Trust

__all__ = ["HuggingfaceAttention"]


class HuggingfaceAttention(MegatronModule, ABC):
    """The self-attention of a layer, computed by ``hf_forward`` on whole sequences.

    Args:
        args: the run's arguments; the config of ``args.hf_checkpoint`` becomes ``hf_config``.
        config: Megatron's config.
        layer_number: counts from 1; ``hf_layer_idx`` counts from 0.
        cp_comm_type: ignored; Megatron passes it to every attention.
        pg_collection: the parallel groups; None for Megatron's own.
    """

    def __init__(
        self,
        args: Namespace,
        config: TransformerConfig,
        layer_number: int,
        cp_comm_type: str | None = "p2p",
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.args = args
        self.layer_number = layer_number
        self.hf_layer_idx = layer_number - 1
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.hf_config = AutoConfig.from_pretrained(
            args.hf_checkpoint, trust_remote_code=Trust.of(args).trust_remote_code
        )
        self.hf_config._attn_implementation = "flash_attention_2" if torch.cuda.is_available() else "sdpa"

    @abstractmethod
    def hf_forward(self, hidden_states: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
        """Compute the attention of a packed stream.

        Args:
            hidden_states: [1, T, hidden], the sequences concatenated.
            packed_seq_params: ``cu_seqlens_q`` has the sequences' starts; padding is a separate sequence.

        Returns:
            [1, T, hidden].
        """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return the attention's output for this rank's tokens, [s, 1, hidden], and None for the bias.

        Args:
            hidden_states: [s, 1, hidden]
            attention_mask: ignored; ``hf_forward`` gets the sequences.
            packed_seq_params: lengths over all context-parallel ranks.
        """
        assert packed_seq_params is not None, "attention of a packed stream needs packed_seq_params"
        x = hidden_states
        if self.config.sequence_parallel:
            # From here to the scatter all ranks compute the same, also in the backward pass: each slices the gradient.
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=self.tp_group)
        if (cp_size := self.cp_group.size()) > 1:
            order = natural_order(packed_seq_params, cp_size)
            # In the backward pass each rank has only the gradient of its own tokens' outputs, so these are summed.
            x = gather_from_sequence_parallel_region(x, group=self.cp_group).index_select(0, order)
        out = self.hf_forward(x.transpose(0, 1), packed_seq_params).transpose(0, 1)
        if cp_size > 1:
            out = out.index_select(0, order.argsort().chunk(cp_size)[self.cp_group.rank()])
        if self.config.sequence_parallel:
            out = scatter_to_sequence_parallel_region(out, group=self.tp_group)
        return out, None
