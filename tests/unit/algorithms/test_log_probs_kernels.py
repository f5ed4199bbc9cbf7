"""The fused log-prob kernels in Triton's interpreter, on CPU tensors, against the plain path in fp64.

tests/gpu/test_log_probs_kernels.py runs the compiled ones.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.triton_here import needs_triton

REPO = Path(__file__).parents[3]


def compare_all() -> None:
    """In a process with TRITON_INTERPRET=1."""
    import torch

    from slime.algorithms import log_probs, log_probs_kernels

    log_probs_kernels.BLOCK = 16  # several blocks in a row
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(12, 50, generator=generator)
    logits[:, 45:] = 50.0  # padding that would win every row
    logits[3, 17] = float("-inf")
    logits[5] *= 200
    rows = torch.randperm(12, generator=generator)[:7]
    targets = torch.randint(0, 45, (7,), generator=generator)
    weights = torch.linspace(-1, 1, 7, dtype=torch.float64)

    def run(values, kernels, with_entropy, temperature, overwrite):
        log_probs._kernels_for = lambda logits: kernels
        leaf = values.clone().requires_grad_()
        log_prob, entropy = log_probs.vocab_parallel_log_probs(
            leaf * 1,
            targets,
            rows_R=rows,
            vocab_size=45,
            with_entropy=with_entropy,
            temperature=temperature,
            overwrite_logits=overwrite,
        )
        loss = (log_prob.double() * weights).sum()
        if with_entropy:
            loss = loss + 0.3 * (entropy.double() * weights).sum()
        loss.backward()
        return log_prob.detach().double(), entropy.detach().double() if with_entropy else None, leaf.grad.double()

    for dtype, *setting in itertools.product(
        (torch.float32, torch.bfloat16), (False, True), (1.0, 0.7), (False, True)
    ):
        found = run(logits.to(dtype), log_probs_kernels, *setting)
        wanted = run(logits.to(dtype).double(), None, *setting)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=3e-6)
        if setting[0]:
            torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=3e-6)
        tolerance = (1e-4, 1e-6) if dtype == torch.float32 else (1e-2, 1e-5)
        torch.testing.assert_close(found[2], wanted[2], rtol=tolerance[0], atol=tolerance[1])

    largest, sums = log_probs_kernels.row_sums(
        logits, rows_R=rows, local_target_R=targets, with_entropy=True, temperature=1.0, num_columns=0
    )
    assert torch.equal(sums, torch.zeros_like(sums)) and largest.isfinite().all()  # a shard that is all padding


@needs_triton
def test_kernels_give_the_values_and_gradients_of_the_plain_path():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"import {__name__} as case; case.compare_all()"]
    run = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
