"""The Triton kernels of the tables in Triton's interpreter, on CPU tensors, against the torch path of the same tables.

tests/gpu/test_weight_kernels.py runs the compiled ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.triton_here import needs_triton

REPO = Path(__file__).parents[4]


def compare_all() -> None:
    """In a process with TRITON_INTERPRET=1."""
    import torch

    from slime.ext.fast_push.kernels.tables import CopyTable, DigestTable, as_unsigned
    from slime.weights.digest import digest_bytes
    from tests.ext.fast_push.kernels.table_cases import COPY_BYTES, cast_items, check_joined_items, copy_items, filled

    # The interpreter takes its time for each tile.
    for out_dtype, kinds in ((torch.bfloat16, ()), (torch.float32, ("cast",))):
        items = cast_items("cpu", 32, out_dtype, kinds=kinds)
        found = filled(items, out_dtype, 32, use_triton=True)
        wanted = filled(items, out_dtype, 32, use_triton=False)
        wrong = (found != wanted).nonzero().flatten().tolist()
        assert not wrong, f"{len(wrong)} bytes differ, the first at {wrong[:5]}"

    check_joined_items("cpu", use_triton=True)

    flat = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    copies = copy_items("cpu", flat)
    fused, plain = CopyTable(copies, use_triton=True), CopyTable(copies, use_triton=False)
    assert plain.count_differences(flat).sum() > 0
    assert fused.count_differences(flat).equal(plain.count_differences(flat))
    fused.copy(flat)
    assert plain.count_differences(flat).sum() == 0 and fused.count_differences(flat).sum() == 0

    data = torch.randint(0, 256, (150_000,), dtype=torch.uint8)
    for offsets, lengths in (([0, 16, 1024, 3200], [7, 900, 2000, 140_003]), ([8, 1000], [0, 65_536 + 15])):
        digests = as_unsigned(DigestTable(offsets, lengths, "cpu", use_triton=True).run(data))
        assert digests == [digest_bytes(data[begin : begin + size]) for begin, size in zip(offsets, lengths)]


@needs_triton
def test_every_kernel_gives_the_bytes_of_the_torch_path() -> None:
    code = "from tests.ext.fast_push.kernels.test_triton_tables import compare_all; compare_all()"
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=str(REPO))
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr[-4000:]
