"""The conversion tools on a GPU write what they write on the CPU."""

from __future__ import annotations

import pytest
import torch

from slime.ext.low_precision.folders.run import rewrite_folder
from slime.ext.low_precision.folders.to_bf16 import Fp8ToBf16, Int4ToBf16
from slime.ext.low_precision.folders.to_quantized import to_fp8, to_int4
from tests.ext.low_precision.checkpoints import files_of, tensors_of, write_folder

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

RECIPES = {
    "block": (to_fp8(), Fp8ToBf16()),
    "ue8m0": (to_fp8("block", [32, 64], "ue8m0"), Fp8ToBf16()),
    "channel": (to_fp8("channel"), Fp8ToBf16()),
    "tensor": (to_fp8("tensor"), Fp8ToBf16()),
    "int4": (to_int4(), Int4ToBf16()),
    "int4 with zero points": (to_int4(16, is_symmetric=False), Int4ToBf16()),
}


@pytest.mark.parametrize("name", RECIPES)
def test_both_ways_give_the_files_of_the_cpu(tmp_path, monkeypatch, name):
    source = write_folder(tmp_path / "plain", tensors_of("deepseek_v32"))
    there, back = RECIPES[name]
    monkeypatch.setattr("slime.ext.low_precision.folders.run.CHUNK_BYTES", {"cpu": 2**20, "cuda": 5000})
    for device, workers in (("cpu", 1), ("cuda", 3)):
        rewrite_folder(there, source, tmp_path / device, device=device, workers=workers)
        rewrite_folder(back, tmp_path / device, tmp_path / f"{device}-back", device=device, workers=workers)
    assert files_of(tmp_path / "cuda") == files_of(tmp_path / "cpu")
    assert files_of(tmp_path / "cuda-back") == files_of(tmp_path / "cpu-back")
