"""Which actor rank gets the values of which critic rank."""

from __future__ import annotations

import pytest

from slime.ray.critic import scatter_values
from slime.utils.errors import ConfigError


def ranks(dp: int, cp: int, tp: int, pp: int) -> list[dict[str, int]]:
    """Layouts of a group in Megatron's order: tensor fastest, then context, data, pipeline."""
    return [
        {"dp_size": dp, "cp_size": cp, "dp_rank": d, "cp_rank": c, "is_last_stage": int(p == pp - 1)}
        for p in range(pp)
        for d in range(dp)
        for c in range(cp)
        for _ in range(tp)
    ]


def test_equal_layouts_pass_values_from_rank_to_rank():
    assert scatter_values(["a", "b"], ranks(2, 1, 1, 1), ranks(2, 1, 1, 1)) == ["a", "b"]


def test_only_the_last_stage_gets_values():
    assert scatter_values([None, None, "a", "b"], ranks(2, 1, 1, 2), ranks(2, 1, 1, 2)) == [None, None, "a", "b"]


def test_tensor_and_pipeline_parallelism_may_differ():
    values = scatter_values(["00", "00", "10", "10"], ranks(2, 1, 2, 1), ranks(2, 1, 1, 2))
    assert values == [None, None, "00", "10"]


def test_context_parallel_ranks_get_their_own_part():
    values = [f"{d}{c}" for d in range(2) for c in range(2)]
    assert scatter_values(values, ranks(2, 2, 1, 1), ranks(2, 2, 1, 1)) == values


def test_other_data_parallel_sizes_are_refused():
    with pytest.raises(ConfigError, match="must be equal"):
        scatter_values(["a", "b"], ranks(2, 1, 1, 1), ranks(1, 1, 2, 1))
