"""The MTP layers of GLM-4.5 and DeepSeek-V3 and what is laid out like them.

Published checkpoints of these also hold the embedding and the vocabulary projection once more, as tensors of the MTP
layer.  They are copies: the model has one of each.  Where the checkpoint at ``--hf-checkpoint`` has the copies, every
export gives them too, so that it has all the tensors of its source; loading reads the originals.
"""

from __future__ import annotations

from slime.backends.megatron_utils.weight_maps.rule import Rule

MTP = (
    Rule("eh_proj.weight", ("eh_proj.weight",)),
    Rule("enorm.weight", ("enorm.weight",)),
    Rule("hnorm.weight", ("hnorm.weight",)),
    Rule("final_layernorm.weight", ("shared_head.norm.weight",)),
)
"""Beside the layer's ``transformer_layer``, whose tensors are named as those of any layer."""

MTP_COPIES = {
    "embedding.word_embeddings.weight": "embed_tokens.weight",
    "output_layer.weight": "shared_head.head.weight",
}
"""Megatron's parameter -> what its copy is called behind the prefix of an MTP layer."""
