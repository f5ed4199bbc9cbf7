"""Parameters of a few models in the trainer's layout, and the HF tensors made from them.

Dimensions come from the models' config.json; the fused projections have Megatron's layout: q, k and v of a group of
heads in sequence, gate above up, experts stacked.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]


def model_flags(name: str) -> list[str]:
    """Return the MODEL_ARGS of ``scripts/models/{name}.sh``."""
    script = f'source "{ROOT}/scripts/models/{name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


@dataclass(frozen=True)
class Dimensions:
    """The entries of a config.json that decide shapes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head: int = 128
    experts: int = 0
    has_qkv_bias: bool = False
    has_qk_norm: bool = True
    is_tied: bool = False
    fused_gate_up: bool = False
    """True if the HF checkpoint has gate and up as one matrix."""
    norms: int = 2
    """Matrices of a layer with the width of the hidden state."""


MODELS = {
    "glm4-9b": Dimensions(
        4096, 40, 32, 2, 13696, 151552, has_qkv_bias=True, has_qk_norm=False, fused_gate_up=True, norms=4
    ),
    "qwen3-30b-a3b": Dimensions(2048, 48, 32, 4, 768, 151936, experts=128),
    "qwen3-4b": Dimensions(2560, 36, 32, 8, 9728, 151936, is_tied=True),
    "tiny": Dimensions(256, 2, 4, 2, 160, 512, head=64, experts=4),
}


@dataclass(frozen=True)
class Output:
    """One HF tensor: rows of a parameter, as for ``CastItem``."""

    name: str
    source: Tensor
    row_run: int
    run_stride: int
    rows: int
    is_quantized: bool
    """True if it is quantized in an FP8 checkpoint."""
    layer: int
    """The layer; -1 if the tensor is in none."""


def outputs(dimensions: Dimensions, new: Callable[..., Tensor], layers: int | None = None) -> list[Output]:
    """All HF tensors of the model, over parameters created by ``new(*shape)``.

    Args:
        layers: only this many first layers.
    """
    d = dimensions
    found: list[Output] = []

    def whole(name: str, source: Tensor, is_quantized: bool, layer: int) -> None:
        matrix = source if source.dim() == 2 else source.view(1, -1)
        found.append(Output(name, matrix, matrix.size(0), 0, matrix.size(0), is_quantized, layer))

    def qkv(prefix: str, parameter: Tensor, unit: int, suffix: str, is_quantized: bool, layer: int) -> None:
        """``unit``: rows of one head."""
        per_group = d.heads // d.kv_heads
        group = (per_group + 2) * unit
        for name, first, run in (("q", 0, per_group), ("k", per_group, 1), ("v", per_group + 1, 1)):
            rows = run * unit * d.kv_heads
            source = parameter[first * unit :]
            found.append(Output(f"{prefix}{name}_proj.{suffix}", source, run * unit, group, rows, is_quantized, layer))

    def mlp(prefix: str, gate_up: Tensor, down: Tensor, layer: int) -> None:
        if d.fused_gate_up:
            whole(f"{prefix}gate_up_proj.weight", gate_up, True, layer)
        else:
            whole(f"{prefix}gate_proj.weight", gate_up[: d.ffn], True, layer)
            whole(f"{prefix}up_proj.weight", gate_up[d.ffn :], True, layer)
        whole(f"{prefix}down_proj.weight", down, True, layer)

    whole("model.embed_tokens.weight", new(d.vocab, d.hidden), False, -1)
    for layer in range(d.layers if layers is None else min(layers, d.layers)):
        prefix = f"model.layers.{layer}."
        heads = d.heads + 2 * d.kv_heads
        qkv(f"{prefix}self_attn.", new(heads * d.head, d.hidden), d.head, "weight", True, layer)
        if d.has_qkv_bias:
            qkv(f"{prefix}self_attn.", new(heads, d.head), 1, "bias", False, layer)
        whole(f"{prefix}self_attn.o_proj.weight", new(d.hidden, d.heads * d.head), True, layer)
        if d.has_qk_norm:
            whole(f"{prefix}self_attn.q_norm.weight", new(d.head), False, layer)
            whole(f"{prefix}self_attn.k_norm.weight", new(d.head), False, layer)
        for index in range(d.norms):
            whole(f"{prefix}norm_{index}.weight", new(d.hidden), False, layer)
        if d.experts:
            whole(f"{prefix}mlp.gate.weight", new(d.experts, d.hidden), False, layer)
            gate_up, down = new(d.experts, 2 * d.ffn, d.hidden), new(d.experts, d.hidden, d.ffn)
            for expert in range(d.experts):
                mlp(f"{prefix}mlp.experts.{expert}.", gate_up[expert], down[expert], layer)
        else:
            mlp(f"{prefix}mlp.", new(2 * d.ffn, d.hidden), new(d.hidden, d.ffn), layer)
    whole("model.norm.weight", new(d.hidden), False, -1)
    if not d.is_tied:
        whole("lm_head.weight", new(d.vocab, d.hidden), False, -1)
    return found


def random_parameters(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A maker of parameters with the magnitudes of weights."""

    def new(*shape: int) -> Tensor:
        return torch.empty(*shape, device=device, dtype=dtype).normal_(std=0.02)

    return new
