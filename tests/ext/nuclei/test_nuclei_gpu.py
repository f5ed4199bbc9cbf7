"""Nuclei of both samplers on a GPU, with the overlapped scheduler: a real engine, then only SGLang's kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.backends.sglang_utils.sglang_engine import wait_until_healthy
from slime.ext.nuclei.nuclei import PackedNuclei, joint_nuclei
from tests.ext.nuclei.test_nuclei_cpu import KINDS, Engine, error_of_answers

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(900)]


@pytest.mark.parametrize("sampler", ["flashinfer", "pytorch"])
def test_an_engine_returns_what_its_sampler_drew_from(sampler: str, tmp_path: Path) -> None:
    more = {"device": "cuda", "dtype": "bfloat16", "disable_overlap_schedule": False, "sampling_backend": sampler}
    more |= {"attention_backend": "triton"}
    engine = Engine(tmp_path, disable_cuda_graph=True, **more)
    try:
        wait_until_healthy(engine.process, engine.control, timeout_s=400)
        # With a min-p in the batch, FlashInfer's top-p counts only what its top-k left; the reference does not.
        for absent in ("min_p", "top_k"):
            kinds = [kind for kind in KINDS if absent not in kind]
            assert error_of_answers(engine, kinds=kinds, is_exact=False) < 1e-4
    finally:
        engine.process.stop()


def test_flashinfer_draws_inside_the_nucleus_and_everything_of_it() -> None:
    from flashinfer.sampling import top_k_top_p_sampling_from_probs

    generator = torch.Generator("cuda").manual_seed(0)
    probs = (torch.randn(8, 300, device="cuda", generator=generator) * 2).softmax(-1)
    probs[:, 1::2] = probs[:, ::2]  # every probability twice
    probs /= probs.sum(dim=1, keepdim=True)
    top_k = torch.tensor([1 << 30, 5, 40, 1 << 30, 8, 300, 2, 100], device="cuda", dtype=torch.int32)
    top_p = torch.tensor([0.5, 0.9, 0.8, 0.95, 1.0, 0.3, 0.99, 0.7], device="cuda")
    kept = joint_nuclei(probs, top_k, top_p)
    drawn = torch.zeros_like(kept)
    for _ in range(20_000):
        tokens = top_k_top_p_sampling_from_probs(probs, top_k, top_p, filter_apply_order="joint")
        drawn.scatter_(1, tokens.long()[:, None], True)
    assert not bool((drawn & ~kept).any())
    likely = kept & (probs > 1e-3)
    assert bool((drawn | ~likely).all())


def test_bits_reach_the_host_while_the_gpu_works_on() -> None:
    kept = torch.rand(64, 151_936, device="cuda") < 0.001
    packed = PackedNuclei(kept, [True] * 64)
    for row in (0, 63):
        assert packed[row] == kept[row].nonzero().flatten().to(torch.int32).cpu().numpy().tobytes()
