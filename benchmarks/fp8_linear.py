"""Training a dense decoder on one GPU in bf16 and in FP8: tokens/s, and the distance to an FP8 engine.

    python benchmarks/fp8_linear.py                      # Qwen3-0.6B's shape, H200
    python benchmarks/fp8_linear.py --hidden 64 --ffn 128 --layers 2 --tokens 64 --device cpu

The layers are plain torch (norm, fused QKV, attention, gated MLP) around the trainer's own FP8 products, so they
need neither Megatron's process groups nor SGLang.  The engine is the same model in bf16 with every matrix rounded as
in an FP8 checkpoint, and activations rounded in groups of 128 like SGLang's, multiplied as plain numbers.
Prints one JSON line: tokens/s of forward and backward, |dlogp| of bf16 and of FP8 training against the FP8 engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends.megatron_utils import cpu_platform  # noqa: E402, F401
from slime.ext.low_precision.fp8_linear import ROW, Fp8Product, kernels_for, rounded  # noqa: E402
from slime.weights.quantize.block_fp8 import DEFAULT_BLOCK  # noqa: E402


class Linear(nn.Linear):
    """A matrix without bias, multiplied in one of three ways."""

    way = "bf16"

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "bf16":
            return super().forward(x)
        flat = x.flatten(0, -2)
        if self.way == "fp8":
            y = Fp8Product.apply(flat, self.weight)
        else:
            y = (rounded(flat, ROW).float() @ rounded(self.weight, DEFAULT_BLOCK).float().t()).to(x.dtype)
        return y.unflatten(0, x.shape[:-1])


class Layer(nn.Module):
    """Norm, attention, norm, gated MLP."""

    def __init__(self, hidden: int, ffn: int, heads: int, groups: int, width: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, width
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = Linear(hidden, (heads + 2 * groups) * width, bias=False)
        self.proj = Linear(heads * width, hidden, bias=False)
        self.fc1, self.fc2 = Linear(hidden, 2 * ffn, bias=False), Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.heads * self.width, self.groups * self.width, self.groups * self.width]
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(sizes, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        gate, up = self.fc1(self.norm2(x)).chunk(2, dim=-1)
        return x + self.fc2(F.silu(gate) * up)


class Model(nn.Module):
    """Embedding, layers, norm, vocabulary projection; the ends stay in bf16."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        o = options
        self.embedding = nn.Embedding(o.vocab, o.hidden)
        self.layers = nn.ModuleList(Layer(o.hidden, o.ffn, o.heads, o.groups, o.width) for _ in range(o.layers))
        self.norm = nn.RMSNorm(o.hidden)
        self.head = nn.Linear(o.hidden, o.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[1, T] ids to [1, T, hidden]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def log_probs(model: Model, tokens: Tensor) -> Tensor:
    """[T - 1] log-probs of the tokens, computing logits for a thousand at a time."""
    hidden = model(tokens)[0, :-1]
    rows = [
        -F.cross_entropy(model.head(part).float(), ids, reduction="none")
        for part, ids in zip(hidden.split(1024), tokens[0, 1:].split(1024), strict=True)
    ]
    return torch.cat(rows)


def tokens_per_s(model: Model, tokens: Tensor, repeats: int) -> float:
    """Of the layers alone, forward and backward, after three warm-up runs."""

    def wait() -> None:
        if tokens.is_cuda:
            torch.cuda.synchronize()

    for run in range(repeats + 3):
        if run == 3:
            wait()
            start = time.perf_counter()
        model(tokens).float().square().mean().backward()
        model.zero_grad(set_to_none=True)
    wait()
    return repeats * tokens.numel() / (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = {"hidden": 1024, "ffn": 3072, "layers": 28, "heads": 16, "groups": 8, "width": 128, "vocab": 151936}
    for name, value in (shape | {"tokens": 8192, "repeats": 10}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model(options).to(options.device, torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.02)
        model.head.weight.normal_(0, 0.1)
    tokens = torch.randint(options.vocab, (1, options.tokens), device=options.device)
    weight = model.layers[0].fc1.weight
    uses_kernels = kernels_for(torch.zeros(1, options.hidden, device=options.device, dtype=torch.bfloat16), weight)
    found: dict[str, object] = {"shape": vars(options), "block_scaled_products": uses_kernels is not None}
    rows = {}
    for way in ("bf16", "fp8", "engine"):
        Linear.way = way
        if way != "engine":
            found[f"{way}_tokens_per_s"] = round(tokens_per_s(model, tokens, options.repeats))
        with torch.no_grad():
            rows[way] = log_probs(model, tokens)
    for way in ("bf16", "fp8"):
        difference = (rows[way] - rows["engine"]).abs()
        found[f"dlogp_{way}_mean"], found[f"dlogp_{way}_max"] = float(difference.mean()), float(difference.max())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
