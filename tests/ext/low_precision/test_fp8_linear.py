"""FP8 products on the CPU: by hand, against loops over blocks, and in a model against an FP8 engine."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.megatron_utils.layers.products import experts_linear
from slime.ext.low_precision import fp8_linear
from slime.ext.low_precision.fp8_linear import Fp8Product, Rows, qkv_rows, rounded
from slime.weights.quantize.block_fp8 import quantize_block
from slime_plugins.models.qwen3_next.family import merge_gated_qkv
from tests.matrix import trainer
from tests.matrix.batch import make_train_data
from tests.matrix.case import load_cases
from tests.matrix.parity import one_process_world

UNIT = 2.0**-4
"""e4m3 has three bits of mantissa: rounding changes a number by at most 1/16, except for the smallest ones."""


def by_loops(matrix: Tensor, height: int, width: int) -> Tensor:
    """The values that q(matrix) represents, block by block."""
    result = torch.empty_like(matrix)
    for row in range(0, matrix.size(0), height):
        for column in range(0, matrix.size(1), width):
            block = matrix[row : row + height, column : column + width]
            scale = block.abs().max().clamp(min=1e-10) / 448
            codes = (block / scale).to(torch.float8_e4m3fn).float()
            result[row : row + height, column : column + width] = codes * scale
    return result


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", [(5, 256, 128), (130, 200, 300), (1, 16, 8)])
def test_the_three_products_are_those_of_numbers_rounded_by_block(sizes: tuple[int, int, int]) -> None:
    tokens, inputs, outputs = sizes
    x, weight = draw(tokens, inputs).requires_grad_(), draw(outputs, inputs, seed=1).requires_grad_()
    grad = draw(tokens, outputs, seed=2)
    y = Fp8Product.apply(x, weight)
    y.backward(grad)
    with torch.no_grad():
        blocks = by_loops(weight, 128, 128)
        torch.testing.assert_close(y, by_loops(x, 1, 128) @ blocks.t(), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(x.grad, by_loops(grad, 1, 128) @ blocks, rtol=1e-6, atol=1e-5)
        over_tokens = by_loops(grad.t().contiguous(), 1, 128) @ by_loops(x.t().contiguous(), 1, 128).t()
        torch.testing.assert_close(weight.grad, over_tokens, rtol=1e-6, atol=1e-5)
        # Both factors are off by at most 1/16 (the smallest numbers of a block by less than its largest / 448 / 2^9).
        for found, left, right in ((y, x, weight.t()), (x.grad, grad, weight), (weight.grad, grad.t(), x)):
            bound = (2 * UNIT + UNIT**2) * (left.abs() @ right.abs()) + 1e-3
            assert bool(((found - left @ right).abs() <= bound).all())


@pytest.mark.parametrize(("width", "heads", "groups"), [(64, 8, 2), (16, 4, 4), (128, 4, 2)])
def test_queries_keys_and_values_have_the_blocks_of_the_checkpoints_matrices(width, heads, groups) -> None:
    """The checkpoint's matrices have different sizes, so that a block across two of them would be noticed."""
    q, k, v = draw(heads * width, 64), 30 * draw(groups * width, 64, seed=1), 900 * draw(groups * width, 64, seed=2)
    grouped = [part.view(groups, -1, 64) for part in (q, k, v)]
    weight = torch.cat(grouped, dim=1).flatten(0, 1).requires_grad_()  # Megatron's order
    config = Namespace(
        kv_channels=width, num_attention_heads=heads, num_query_groups=groups, attention_output_gate=False
    )
    x = draw(5, 64, seed=3)
    y = qkv_rows(config, len(weight)).product(x, weight)
    expected = [Fp8Product.apply(x, part).view(5, groups, -1) for part in (q, k, v)]
    assert torch.equal(y, torch.cat(expected, dim=2).flatten(1))
    for part in (q, k, v):
        codes, scale = quantize_block(part)
        assert torch.equal(rounded(part, (128, 128)), by_loops(part, 128, 128)), (codes, scale)
    y.sum().backward()
    assert weight.grad is not None and bool((weight.grad != 0).all())


def test_gates_of_queries_have_the_blocks_of_the_checkpoints_matrix() -> None:
    sizes: Any = Namespace(num_attention_heads=4, num_query_groups=2, head_dim=48)
    parts = draw(4 * 2 * 48, 64), 30 * draw(2 * 48, 64, seed=1), 900 * draw(2 * 48, 64, seed=2)
    parts[0].view(4, 2, 48, 64)[:, 1] *= 7  # gates, each after its query
    config = Namespace(kv_channels=48, num_attention_heads=4, num_query_groups=2, attention_output_gate=True)
    weight, x = merge_gated_qkv(*parts, sizes), draw(5, 64, seed=3)
    y = qkv_rows(config, len(weight)).product(x, weight)
    expected = [Fp8Product.apply(x, part).t() for part in parts]
    assert torch.equal(y, merge_gated_qkv(*expected, sizes).t())


def test_each_expert_has_products_and_blocks_of_its_own() -> None:
    stacked = Namespace(weight=draw(3, 256, 40).requires_grad_())
    x = draw(6, 40, seed=1)
    y = experts_linear(Rows((128, 128)), stacked, x, torch.tensor([4, 0, 2]))
    expected = [by_loops(x[:4], 1, 128) @ by_loops(stacked.weight[0].detach(), 128, 128).t()]
    expected += [by_loops(x[4:], 1, 128) @ by_loops(stacked.weight[2].detach(), 128, 128).t()]
    torch.testing.assert_close(y, torch.cat(expected), rtol=1e-6, atol=1e-5)
    y.sum().backward()
    assert bool((stacked.weight.grad[1] == 0).all()) and bool((stacked.weight.grad[[0, 2]] != 0).any())


class EngineLinear(torch.nn.Module):
    """A linear layer as an engine serves it: the checkpoint's FP8 blocks, activations rounded in groups of 128."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = by_loops(linear.weight.detach(), 128, 128), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(by_loops(x.flatten(0, -2), 1, 128).view(x.shape), self.weight, self.bias)


def serve_in_fp8(module: torch.nn.Module) -> None:
    """Every matrix of the layers except the router."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear) and name not in ("lm_head", "gate"):
            setattr(module, name, EngineLinear(child))
        else:
            serve_in_fp8(child)


def engine_log_probs(model: torch.nn.Module, data: dict) -> list[Tensor]:
    rows = []
    for tokens, length in zip(data["tokens"], data["response_lengths"], strict=True):
        with torch.no_grad():
            logits = model(torch.as_tensor(tokens)[None]).logits[0].float().log_softmax(-1)
        picked = torch.as_tensor(tokens)[-length:]
        rows.append(logits[-length - 1 : -1].gather(1, picked[:, None])[:, 0])
    return rows


def largest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_a_trainer_in_fp8_has_the_log_probs_of_an_engine_in_fp8(family: str, tmp_path: Path) -> None:
    case = load_cases([family])[family]
    case.write_checkpoint(tmp_path)
    data = make_train_data(case.vocab_size)
    engine = case.load_reference(tmp_path)
    serve_in_fp8(engine)
    errors = {}
    with one_process_world():
        from slime.backends.megatron_utils import initialize

        for flags in ((), ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--fp8-param-gather")):
            args = trainer.make_args(case, tmp_path, *flags)
            if not errors:
                initialize.init(args)
            model = trainer.load_model(args)
            rank_data = trainer.prepare(args, data)
            rows = trainer.response_log_probs(args, model, rank_data)
            errors[bool(flags)] = largest(rows, engine_log_probs(engine, rank_data))
            reports = trainer.run_backward(args, model, trainer.prepare(args, data))
            assert reports and all(p.main_grad.isfinite().all() for p in model[0].parameters())
    print(f"\n{family}: largest |dlogp| without {errors[False]:.1e}, with FP8 training {errors[True]:.1e}")
    assert errors[True] < 1e-3 < 1e-2 < errors[False]


@pytest.mark.parametrize(("family", "num_mtp_layers"), [("qwen3", 0), ("mimo", 2)])
def test_layers_at_the_ends_of_the_model_may_stay_bf16(family: str, num_mtp_layers: int, tmp_path: Path) -> None:
    case = load_cases([family])[family]
    case.write_checkpoint(tmp_path)
    flags = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--first-last-layers-bf16")
    with one_process_world():
        from slime.backends.megatron_utils import initialize

        args = trainer.make_args(case, tmp_path, *flags, "--num-layers-at-start-in-bf16", 1)
        initialize.init(args)
        (chunk,) = trainer.load_model(args)
        names = [
            name
            for name, module in chunk.named_modules()
            if "_forward_impl" in vars(module) or "forward" in vars(module)
        ]
    layers = {".".join(name.removeprefix("module.").split(".")[:3]) for name in names}
    inner = {f"decoder.layers.{index}" for index in range(1, args.num_layers - 1)}
    assert layers == inner | {f"mtp.layers.{index}" for index in range(num_mtp_layers)}
    assert not any("eh_proj" in name for name in names)
    assert not any("output_layer" in name or "embedding" in name for name in names)
    assert fp8_linear.BLOCK == 128
