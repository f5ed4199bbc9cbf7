"""Multi-token prediction (MTP): layers after the model that predict tokens further ahead, trained without changing the
model.

Layer k combines the hidden state of a position with the embedding of the token k places ahead, passes the result
through a transformer layer, and predicts the next token with the model's vocabulary projection (DeepSeek-V3, arXiv
2412.19437).  Engines use these layers as the draft model of speculative decoding.

Layers and parameter names are megatron-core's.  The training differs:

* The hidden states, the embeddings and the vocabulary projection are detached, so the loss reaches only the MTP
  layers.
* A forward pass returns the logits and the log-probs of the tokens further ahead.  The MTP loss is computed from these
  next to the policy loss, with the same denominators.
* On the last pipeline stage the embedding is a plain copy, sent by the first stage before every step.  megatron-core
  makes it a second parameter with a gradient buffer and optimizer state, whose gradient would always be zero here.
* If MTP is not trained, the layers are loaded, frozen, saved and pushed, but not run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import mpu, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.algorithms.log_probs import vocab_parallel_log_probs
from slime.backends.megatron_utils.layers.norm import Norm
from slime.backends.megatron_utils.log_probs import vocab_group
from slime.train_data.microbatch import PackingConfig
from slime.train_data.multi_token import MultiTokenDepth, multi_token_depths


@dataclass(frozen=True, slots=True)
class MtpInputs:
    """Inputs of a forward pass that runs the MTP layers."""

    depths: Sequence[MultiTokenDepth]
    """One per MTP layer."""
    vocab_size: int
    """Without padding."""
    chunk_size: int
    """Rows of logits computed at a time; -1 for all rows."""


class LogitsAndMtp(NamedTuple):
    """Output of a forward pass with :class:`MtpInputs`."""

    logits: Tensor
    """[1, T, V], of the model."""
    mtp_log_probs: list[Tensor]
    """Per depth, [R] log-probs of ``MultiTokenDepth.target_R``."""


def get_mtp_spec(config: TransformerConfig, block: ModuleSpec | TransformerBlockSubmodules) -> ModuleSpec:
    """Return ``--mtp-num-layers`` MTP layers, each around the block's ``mtp_layer``, or else its last layer."""
    if isinstance(block, ModuleSpec):
        inner = block
    else:
        inner = getattr(block, "mtp_layer", None) or block.layer_specs[-1]
    layer = ModuleSpec(
        module=MtpLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=Norm,
            hnorm=Norm,
            eh_proj=tensor_parallel.ColumnParallelLinear,
            transformer_layer=inner,
            layer_norm=Norm,
        ),
    )
    layers = MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)
    return ModuleSpec(module=MtpBlock, submodules=layers)


def without_mtp(config: TransformerConfig) -> TransformerConfig:
    """Return a copy of the config without the field that makes megatron-core build MTP layers."""
    trunk = copy.copy(config)
    trunk.mtp_num_layers = None
    return trunk


class MtpLayer(MultiTokenPredictionLayer):
    """One layer: ``norm(transformer_layer(eh_proj([enorm(embedding); hnorm(hidden)])))``."""

    def forward(self, hidden: Tensor, embedded: Tensor, **layer_arguments: Any) -> Tensor:
        """Map [t, 1, h] to [t, 1, h]; under sequence parallelism t is a slice of the tokens.

        Args:
            hidden: output of the model's final norm, or of the previous MTP layer.
            embedded: embeddings of the tokens further ahead, without gradient.
            layer_arguments: passed to the transformer layer.
        """

        def run(hidden: Tensor, embedded: Tensor) -> Tensor:
            return self._proj_and_transformer_layer(hidden_states=hidden, decoder_input=embedded, **layer_arguments)

        if not (self.training and self.config.recompute_granularity == "full"):
            return run(hidden, embedded)
        if not hidden.requires_grad:
            # Recomputation computes gradients only if one of its inputs requires one; otherwise the parameters would
            # silently get none.
            hidden = hidden.detach().requires_grad_()
        return tensor_parallel.checkpoint(run, False, hidden, embedded)


class MtpBlock(MultiTokenPredictionBlock):
    """The MTP layers; each gets the hidden states of the previous one."""

    def forward(
        self,
        hidden: Tensor,
        inputs: Sequence[Tensor],
        embed: Callable[[Tensor], Tensor],
        **layer_arguments: Any,
    ) -> list[Tensor]:
        """Return the hidden states [t, 1, h] of each depth.

        Args:
            hidden: output of the model's final norm; detached here.
            inputs: [1, T] token ids per depth.
            embed: maps token ids to embeddings [t, 1, h].
            layer_arguments: passed to the transformer layers.
        """
        hidden = hidden.detach()
        outputs = []
        for layer, input_ids in zip(self.layers, inputs, strict=True):
            with torch.no_grad():
                embedded = embed(input_ids)
            hidden = layer(hidden, embedded, **layer_arguments)
            outputs.append(hidden)
        return outputs


class GPTModelWithMtp(GPTModel):
    """GPTModel with MTP layers on the stage of its vocabulary projection.

    Invariant: in memory, on disk and in weight pushes the layers are named ``mtp.layers.{j}``.  If ``trains_mtp`` is
    False, none of their parameters requires a gradient.
    """

    def __init__(self, config: TransformerConfig, *args: Any, mtp_spec: ModuleSpec, trains_mtp: bool, **kwargs: Any):
        super().__init__(without_mtp(config), *args, **kwargs)
        self._mtp_inputs: MtpInputs | None = None
        # A tuple hides this copy from the module's parameters: another stage owns the original.
        self._embedding_copy: tuple[LanguageModelEmbedding, ...] = ()
        if not self.post_process:
            return
        # The layers share the model's config, see without_mtp.
        self.mtp = MtpBlock(config=self.config, spec=mtp_spec, vp_stage=self.vp_stage)
        for layer in self.mtp.layers:
            mlp = layer.transformer_layer.mlp
            if hasattr(mlp, "set_layer_number"):
                # megatron-core's table of auxiliary losses has rows only for the model's own layers.
                mlp.set_layer_number(config.num_layers)
        if not trains_mtp:
            self.mtp.requires_grad_(False)
        elif not self.pre_process:
            copied = LanguageModelEmbedding(
                config=self.config,
                vocab_size=self.vocab_size,
                max_sequence_length=self.max_sequence_length,
                position_embedding_type="none",
                tp_group=self.pg_collection.tp,
            )
            self._embedding_copy = (copied.requires_grad_(False),)

    def forward(self, *args: Any, mtp_inputs: MtpInputs | None = None, **kwargs: Any) -> Any:
        """Run GPTModel's forward; with ``mtp_inputs``, return :class:`LogitsAndMtp` on the stage with the vocabulary
        projection.
        """
        self._mtp_inputs = mtp_inputs
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._mtp_inputs = None

    def _postprocess(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """Compute the logits as GPTModel does, and with MTP inputs the log-probs of the MTP layers."""
        output = super()._postprocess(hidden_states, **kwargs)
        inputs = self._mtp_inputs
        if inputs is None or not self.post_process:
            return output
        hidden_states_by_depth = self.mtp(
            hidden_states,
            [depth.input_ids for depth in inputs.depths],
            self._embed,
            attention_mask=kwargs["attention_mask"],
            rotary_pos_emb=kwargs["rotary_pos_emb"],
            rotary_pos_cos=kwargs["rotary_pos_cos"],
            rotary_pos_sin=kwargs["rotary_pos_sin"],
            packed_seq_params=kwargs["packed_seq_params"],
            sequence_len_offset=kwargs["sequence_len_offset"],
        )
        log_probs = [
            self._log_probs(hidden, depth, inputs)
            for hidden, depth in zip(hidden_states_by_depth, inputs.depths, strict=True)
        ]
        return LogitsAndMtp(output, log_probs)

    def _embed(self, input_ids: Tensor) -> Tensor:
        embedding = self.embedding if self.pre_process else self._embedding_copy[0]
        return embedding(input_ids=input_ids, position_ids=None)

    def _log_probs(self, hidden: Tensor, depth: MultiTokenDepth, inputs: MtpInputs) -> Tensor:
        """Return [R] log-probs of the depth's targets, with at most one chunk of logit rows in memory."""
        shared = self.share_embeddings_and_output_weights
        weight = (self.shared_embedding_or_output_weight() if shared else self.output_layer.weight).detach()
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)

        def read(hidden_K: Tensor, target_K: Tensor) -> Tensor:
            log_prob_K, _ = vocab_parallel_log_probs(
                F.linear(hidden_K, weight),
                target_K,
                tp_group=vocab_group(),
                chunk_size=inputs.chunk_size,
                vocab_size=inputs.vocab_size,
                overwrite_logits=True,
            )
            return log_prob_K

        hidden_R = hidden[:, 0].index_select(0, depth.row_R)
        size = inputs.chunk_size
        if size <= 0 or len(hidden_R) <= size:
            return read(hidden_R, depth.target_R)
        pieces = zip(hidden_R.split(size), depth.target_R.split(size), strict=True)
        return torch.cat([checkpoint(read, *piece, use_reentrant=False) for piece in pieces])


@torch.no_grad()
def send_embedding_to_mtp(model: Sequence[torch.nn.Module]) -> None:
    """Update the last pipeline stage's copy of the embedding.  Collective over the first and the last stage.

    Call it before a step that trains MTP layers; it does nothing without pipeline parallelism.
    """
    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return
    if mpu.is_pipeline_first_stage(ignore_virtual=True):
        chunk = model[0]
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)  # the all-gather of the new weights may still be in flight
        weight = unwrap_model(chunk).embedding.word_embeddings.weight.data
    elif mpu.is_pipeline_last_stage(ignore_virtual=True):
        inner = unwrap_model(model[-1])
        (embedding,) = inner._embedding_copy
        weight = embedding.to(inner.decoder.final_layernorm.weight.device).word_embeddings.weight.data
    else:
        return
    group = mpu.get_embedding_group()
    dist.broadcast(weight, src=dist.get_process_group_ranks(group)[0], group=group)


# The loss of the MTP layers: the inputs of a forward pass, and the loss from the resulting log-probs.
#
#     loss of depth k = minus the log-prob of the token 1 + k ahead, averaged over the step like the policy loss
#     loss = --mtp-loss-scaling-factor * mean over the depths
#
# It has the masks and denominators of the policy loss, so it does not depend on packing or parallel layout.  The
# softmax has temperature 1.


def mtp_inputs(
    chunk: torch.nn.Module, batch: dict[str, Any], packing: PackingConfig, *, vocab_size: int, chunk_size: int
) -> MtpInputs | None:
    """Return inputs and targets of the MTP layers for a batch of ``data.get_batch``; None if the chunk has no MTP
    layers.
    """
    mtp: MtpBlock | None = getattr(unwrap_model(chunk), "mtp", None)
    if mtp is None:
        return None
    depths = multi_token_depths(
        len(mtp.layers),
        batch["unconcat_tokens"],
        batch["loss_masks"],
        None if mtp.config.calculate_per_token_loss else batch["rollout_mask_sums"],
        packing,
    )
    assert depths[0].input_ids.shape == batch["tokens"].shape, (depths[0].input_ids.shape, batch["tokens"].shape)
    return MtpInputs(depths=depths, vocab_size=vocab_size, chunk_size=chunk_size)


def mtp_loss(depths: Sequence[MultiTokenDepth], log_probs: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss over the depths, reduced but not yet scaled, and its metrics.

    Returns:
        the loss, and ``mtp_loss`` with ``mtp_{depth}_loss``, depths counted from 1.
    """
    # Masked tokens contribute nothing, not even a NaN.
    losses = [
        -torch.where(depth.weight_R != 0, log_prob_R * depth.weight_R, 0.0).sum()
        for depth, log_prob_R in zip(depths, log_probs, strict=True)
    ]
    loss = torch.stack(losses).mean()
    by_depth = {f"mtp_{index}_loss": value for index, value in enumerate(losses, start=1)}
    return loss, {"mtp_loss": loss, **by_depth}
