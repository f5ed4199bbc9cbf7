"""Which trainer ranks must know each other's buffers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from slime.ext.fast_push.shared_memory import neighbourhoods


@dataclass
class Engine:
    gpu_offset: int
    num_gpus: int


@pytest.mark.parametrize(
    ("engines", "world_size", "per_host", "expected"),
    [
        ([(0, 1), (1, 1)], 2, 2, [[0, 1]]),
        ([(0, 2), (4, 2)], 8, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([(0, 8)], 8, 4, [list(range(8))]),
        ([(4, 2)], 8, 4, [[4, 5, 6, 7]]),
        ([(4, 8)], 16, 4, [[4, 5, 6, 7, 8, 9, 10, 11]]),
        ([], 4, 4, []),
    ],
)
def test_ranks_of_a_host_and_of_all_hosts_of_an_engine(engines, world_size, per_host, expected) -> None:
    assert neighbourhoods([Engine(*engine) for engine in engines], world_size, per_host) == expected
