"""Shared memory of killed engines is removed, and no other."""

from __future__ import annotations

import mmap
import os
import time

from slime.backends.sglang_utils.sglang_engine import YOUNG_SEGMENT_S, remove_segments


def test_only_old_segments_that_no_process_has_mapped_are_removed(tmp_path):
    names = ("sglang_loads_a.shm", "sgl_shm_mq_1_b", "sglang_loads_mapped.shm", "sglang_loads_young.shm", "torch_1_2")
    for name in names:
        (tmp_path / name).write_bytes(bytes(4096))
        age_s = 0.0 if "young" in name else 2 * YOUNG_SEGMENT_S
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    with (tmp_path / names[2]).open("r+b") as file, mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ):
        assert sorted(path.name for path in remove_segments(tmp_path)) == sorted(names[:2])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[2:])
