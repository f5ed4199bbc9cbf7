"""The tensors of an unquantized checkpoint that a conversion quantizes.

What stays as it is: everything without a matrix product of its own (norms, embeddings), what decides discretely
(routers), the vocabulary projection, and matrices that SGLang holds in plain linear layers, which cannot take a scale.
A push follows the converted checkpoint's index, so that these rules decide for it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

SUFFIX = ".weight"
"""Suffix of weights that can be quantized; in a quantized checkpoint other names follow the dot."""

EXCLUDED: Mapping[str, str] = {
    # part of the name -> why
    "norm": "a vector",
    "embed": "looked up, not multiplied",
    "lm_head": "its logits are what is sampled from",
    "shared_head.head": "a copy of lm_head in an MTP layer",
    "router": "chooses experts",
    "mlp.gate.": "chooses experts",
    "block_sparse_moe.gate.": "chooses experts",
    "shared_expert_gate": "one row; a plain linear layer in the engine",
    "weights_proj": "weighs the heads of the sparse-attention indexer",
    "eh_proj": "joins the inputs of an MTP layer; a plain linear layer in the engine",
    "input_proj": "MiMo's eh_proj",
    "mtp.fc.": "Qwen's eh_proj",
    "conv1d": "a convolution",
    "A_log": "a vector of the linear attention",
    "dt_bias": "a vector of the linear attention",
    "in_proj_a": "a few rows of the linear attention",
    "in_proj_b": "a few rows of the linear attention",
    "visual.": "the vision tower",
}


def is_quantized_offline(name: str, shape: Sequence[int] | None = None) -> bool:
    """Return True when a converter quantizes the tensor.

    Args:
        name: HF name of a tensor of an unquantized checkpoint.
        shape: where known; only matrices are quantized.
    """
    if shape is not None and len(shape) != 2:
        return False
    return name.endswith(SUFFIX) and not any(part in name for part in EXCLUDED)


def modules_to_not_convert(names: Iterable[str]) -> list[str]:
    """Return the modules that a quantized config must name, so that engines build them unquantized.

    Args:
        names: of all tensors of the unquantized checkpoint.

    Returns:
        Module names in full, sorted, without those of norms, which no engine would quantize; a vision tower also as a
        whole, by the name that it has in engines.
    """
    kept = [name for name in names if name.endswith(SUFFIX) and not is_quantized_offline(name)]
    towers = {"visual"} if any("visual." in name for name in kept) else set()
    return sorted({name.removesuffix(SUFFIX) for name in kept if "norm" not in name} | towers)
