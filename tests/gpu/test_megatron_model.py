"""The trainer's model on CUDA: flash attention over packed sequences, and log-probs and gradients in bf16 and fp32."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.layers import attention_kernels
from slime.backends.megatron_utils.layers.attention_kernels import per_sequence_attention
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
from slime.backends.megatron_utils.model_provider import get_model_provider
from slime.backends.megatron_utils.parameters import iter_global_parameters
from tests.unit.backends.megatron_utils.megatron_case import (
    FAMILIES,
    hf_flags,
    packed_logits,
    parse,
    start_single_process,
    write_hf_model,
)

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LENGTHS = [1, 700, 33, 5, 64]


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def test_importing_the_platform_module_patches_nothing() -> None:
    assert not cpu_platform.IS_INSTALLED
    assert torch.zeros(1).cuda().is_cuda
    assert type(torch.zeros(1).type()) is str


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "groups", "width", "value_width"),
    [(4, 4, 64, 64), (8, 2, 128, 128), (4, 4, 192, 128), (4, 4, 128, 192), (6, 2, 16, 16)],
    ids=["heads", "groups", "latent", "wide-values", "narrow"],
)
@pytest.mark.parametrize("is_tail", [False, True], ids=["whole", "tail"])
@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("name", ["torch_flash", "flash_attn_4", "varlen_attention"])
def test_flash_attention_over_packed_sequences_equals_fp64(
    dtype: torch.dtype, heads: int, groups: int, width: int, value_width: int, is_tail: bool, window: int | None,
    name: str,
) -> None:  # fmt: skip
    if name == "flash_attn_4" and (not attention_kernels._has_flash_attn_4() or value_width > width):
        pytest.skip("flash-attn-4 is not installed on this GPU machine, or has no values wider than keys")
    kernel = getattr(attention_kernels, name)
    if name == "flash_attn_4" and width < 64:
        # 4.0.0b15 does not compile heads this narrow; the trainer's fallback must be right.
        shape = attention_kernels.HeadShape(heads, groups, width, value_width, dtype, window)
        kernel = attention_kernels.faster_kernel(shape, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    lengths_q = [max(1, length // 2) for length in LENGTHS] if is_tail else LENGTHS

    def random(length: int, *shape: int) -> Tensor:
        x = torch.randn(length, *shape, generator=generator, device="cuda").to(dtype)
        return x.requires_grad_()

    query = random(sum(lengths_q), heads, width)
    key, value = random(sum(LENGTHS), groups, width), random(sum(LENGTHS), groups, value_width)
    scale = 1 / math.sqrt(width)
    cu = cumulative(lengths_q), cumulative(LENGTHS)
    longest = max(lengths_q), max(LENGTHS)
    out = kernel(query, key, value, *cu, *longest, scale=scale, window=window)
    grad = torch.randn(out.shape, generator=generator, device="cuda").to(dtype)
    out.backward(grad)
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    expected = per_sequence_attention(*exact, lengths_q, LENGTHS, scale=scale, window=window)
    expected.backward(grad.double())
    bound = 8e-3 if dtype == torch.bfloat16 else 1e-3
    assert relative_error(out, expected) < bound
    for got, want in zip((query, key, value), exact):
        assert relative_error(got.grad, want.grad) < bound


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("precision", ["--fp32", "--bf16"])
def test_loss_and_gradients_equal_those_of_transformers_in_fp32(tmp_path: Path, family: str, precision: str) -> None:
    hf_model = write_hf_model(tmp_path, family).cuda()
    args = parse(*hf_flags(tmp_path), precision)
    start_single_process(args)
    model = get_model_provider(args)().cuda()
    load_hf_weights(args, [model], tmp_path)
    if precision == "--bf16":
        # Both models start from weights that bf16 can represent.
        hf_model.to(torch.bfloat16).to(torch.float32)
    sequences = [torch.randint(0, args.vocab_size, (length,), device="cuda") for length in (7, 1, 190, 2, 61)]

    def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
        return logits[:-1, : args.vocab_size].float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]

    expected = torch.cat([log_probs(hf_model(s[None]).logits[0], s) for s in sequences])
    actual = torch.cat([log_probs(x, s) for x, s in zip(packed_logits(model, sequences), sequences)])
    weight = torch.linspace(0.5, 1.5, expected.numel(), device="cuda")
    (expected_loss := -(expected * weight).mean()).backward()
    (actual_loss := -(actual * weight).mean()).backward()
    loss_bound, grad_bound = (1e-5, 1e-4) if precision == "--fp32" else (3e-3, 5e-2)
    assert abs(actual_loss - expected_loss) / abs(expected_loss) <= loss_bound
    gradients = {}
    for name, shard in iter_global_parameters([model]):
        gradients.update(
            convert_to_hf(args, FAMILIES[family]["model_type"], name, shard.part_of(shard.parameter.grad))
        )
    wanted = {name: parameter.grad for name, parameter in hf_model.named_parameters()}
    global_norm = torch.cat([grad.flatten() for grad in wanted.values()]).norm()
    errors = {
        name: ((gradients[name].float() - grad).norm() / max(grad.norm(), 1e-3 * global_norm)).item()
        for name, grad in wanted.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    losses = f"loss {actual_loss:.6f}, transformers {expected_loss:.6f}"
    print(f"{family} {precision}: {losses}; worst gradient {worst} {errors[worst]:.2e}")
    assert errors[worst] <= grad_bound, worst
