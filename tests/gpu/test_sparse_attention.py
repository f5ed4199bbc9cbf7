"""Sparse attention on CUDA: the Triton kernels against fp64, their speed and memory, and a small model in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime_plugins.models.glm5.indexer import PackedStream, choose_keys, index_scores
from slime_plugins.models.glm5.sparse_attention import sparse_attention

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative error against fp64 on the same rounded inputs."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def make_case(
    queries: int, heads: int, keys: int, listed: int, value_dim: int, rest: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random queries and keys; the number of listed keys grows with the row, up to all of them in the last row."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    query, key = random(queries, heads, value_dim + rest), random(keys, value_dim + rest)
    noise = torch.rand(queries, keys, generator=generator, device="cuda")
    indices = noise.topk(listed, dim=1).indices.int()
    count = torch.linspace(1, listed, queries, device="cuda").long()
    indices[torch.arange(listed, device="cuda") >= count[:, None]] = -1
    return query.requires_grad_(), key.requires_grad_(), indices, random(queries, heads, value_dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("queries", "heads", "keys", "listed", "value_dim", "rest"),
    [(65, 16, 300, 256, 512, 64), (40, 64, 4096, 2048, 512, 64), (33, 5, 50, 7, 20, 8), (1, 1, 1, 1, 16, 16)],
    ids=["glm5-tp4", "glm5", "tiny", "one"],
)
def test_the_kernels_equal_fp64_forward_and_backward(
    queries: int, heads: int, keys: int, listed: int, value_dim: int, rest: int, dtype: torch.dtype
) -> None:
    query, key, indices, weight = make_case(queries, heads, keys, listed, value_dim, rest, dtype)
    scale = (value_dim + rest) ** -0.5
    out = sparse_attention(query, key, indices, scale=scale, value_dim=value_dim)
    actual = (out, *torch.autograd.grad(out, (query, key), weight))
    wide = [x.detach().double().requires_grad_() for x in (query, key)]
    expected_out = sparse_attention(*wide, indices, scale=scale, value_dim=value_dim)
    expected = (expected_out, *torch.autograd.grad(expected_out, wide, weight.double()))
    errors = [relative_error(got, wanted) for got, wanted in zip(actual, expected, strict=True)]
    print(f"{dtype}: out {errors[0]:.1e}, query gradient {errors[1]:.1e}, key gradient {errors[2]:.1e}")
    assert max(errors) <= BOUNDS[dtype]


@pytest.mark.parametrize("width", [128, 20])
def test_the_indexers_scores_equal_plain_torch(width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    query = torch.randn(130, 32, width, generator=generator, device="cuda").bfloat16()
    key = torch.randn(517, width, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(130, 32, generator=generator, device="cuda")
    expected = index_scores(query.float(), weight, key.float())
    assert relative_error(index_scores(query, weight, key), expected.double()) <= 1e-5


def test_the_choice_of_keys_is_that_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 700, 1300)
    total = sum(lengths)
    query = torch.randn(total, 16, 64, generator=generator).bfloat16()
    key = torch.randn(total, 64, generator=generator).bfloat16()
    weight = torch.randn(total, 16, generator=generator)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    on_cpu = choose_keys(query, weight, key, PackedStream.from_offsets(offsets), first_row=0, topk=128)
    stream = PackedStream.from_offsets(offsets.cuda())
    on_gpu = choose_keys(query.cuda(), weight.cuda(), key.cuda(), stream, first_row=0, topk=128).cpu()
    first, second = (x.sort(dim=1).values for x in (on_cpu, on_gpu))
    # Sums in another order let neighbors at the border swap places.
    assert (first == second).float().mean() > 0.999


def test_long_contexts_stay_within_memory() -> None:
    """One layer's share of the seed: 8,192 rows of a 65,536-token stream, 16 heads, 2,048 keys each."""
    rows, total, heads, topk = 8192, 65536, 16, 2048
    query = torch.randn(rows, heads, 576, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    key = torch.randn(total, 576, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    index_query = torch.randn(rows, 32, 128, device="cuda", dtype=torch.bfloat16)
    index_key = torch.randn(total, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(rows, 32, device="cuda")
    stream = PackedStream.from_offsets(torch.tensor([0, total], device="cuda", dtype=torch.int32))
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def timed(function, *arguments, **options):  # noqa: ANN001, ANN202
        function(*arguments, **options)  # compiles
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = function(*arguments, **options)
        end.record()
        torch.cuda.synchronize()
        return result, begin.elapsed_time(end)

    indices, choosing = timed(choose_keys, index_query, weight, index_key, stream, first_row=total - rows, topk=topk)
    out, forward = timed(sparse_attention, query, key, indices, scale=0.06, value_dim=512)
    _, backward = timed(torch.autograd.grad, out, (query, key), torch.randn_like(out), retain_graph=True)
    peak = (torch.cuda.max_memory_allocated() - start) / 2**30
    print(f"choice {choosing:.1f} ms, forward {forward:.1f} ms, backward {backward:.1f} ms, peak {peak:.2f} GiB")
    assert peak < 4


@pytest.mark.parametrize("name", ["glm5_2", "deepseek_v32"])
def test_a_small_model_in_bf16_equals_transformers(name: str, tmp_path: Path) -> None:
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model_provider
    from tests.matrix.case import load_cases
    from tests.unit.backends.megatron_utils.megatron_case import packed_logits, parse, start_single_process

    case = load_cases([name])[name]
    case.write_checkpoint(tmp_path)
    args = parse("--hf-checkpoint", tmp_path, *case.flags(tmp_path), "--bf16")
    start_single_process(args)
    model = get_model_provider(args)()
    load_hf_weights(args, [model], tmp_path)
    model.bfloat16()
    # No row has more keys than are chosen, because bf16 and fp32 may rank keys differently.
    topk = case.config["index_topk"]
    sequences = [torch.randint(case.vocab_size, (length,), device="cuda") for length in (topk, 1, 3)]
    reference = case.load_reference(tmp_path).cuda()
    logits = packed_logits(model, sequences)
    for ours, sequence in zip(logits, sequences, strict=True):
        expected = reference(sequence[None]).logits[0]
        assert relative_error(ours[:, : case.vocab_size], expected.double()) <= 5e-2
    torch.cat(logits).float().logsumexp(-1).mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients if gradient is not None)
