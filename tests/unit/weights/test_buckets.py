import pytest
import torch

from slime.utils.errors import ConfigError, WeightSyncError
from slime.weights.buckets import iter_buckets, plan_buckets
from slime.weights.manifest import Manifest
from slime.weights.named_tensors import total_bytes, wire_dtype


def tensors(*sizes: int) -> list[tuple[str, torch.Tensor]]:
    """One tensor of so many bytes each."""
    return [(f"t{index}", torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ((4, 4, 4), 8, [["t0", "t1"], ["t2"]]),
        ((4, 4, 4), 12, [["t0", "t1", "t2"]]),
        ((9, 1), 8, [["t0"], ["t1"]]),
        ((1, 9, 1), 8, [["t0"], ["t1"], ["t2"]]),
        ((), 8, []),
    ],
    ids=["two fit", "all fit exactly", "too large goes alone", "too large between", "nothing"],
)
def test_buckets_hold_as_much_as_fits_in_order(sizes: tuple, limit: int, expected: list) -> None:
    assert [[name for name, _ in bucket] for bucket in iter_buckets(tensors(*sizes), limit)] == expected


def test_only_one_bucket_is_made_ahead() -> None:
    made = []

    def source():
        for name, tensor in tensors(4, 4, 4, 4, 4):
            made.append(name)
            yield name, tensor

    next(iter_buckets(source(), 8))
    assert made == ["t0", "t1", "t2"]


def in_pairs(name: str) -> tuple[str, ...]:
    """t1 and t4 belong together, and so do t5 and t6."""
    return next((pair for pair in (("t1", "t4"), ("t5", "t6")) if name in pair), ())


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (100, [["t0", "t2", "t3", "t1", "t4", "t5", "t6"]]),
        (8, [["t0", "t2"], ["t3"], ["t1", "t4"], ["t5", "t6"]]),
        (1, [["t0"], ["t2"], ["t3"], ["t1", "t4"], ["t5", "t6"]]),
    ],
    ids=["all fit", "one pair each", "pairs larger than a bucket"],
)
def test_tensors_that_belong_together_are_never_parted(limit: int, expected: list) -> None:
    buckets = iter_buckets(tensors(*[4] * 7), limit, in_pairs)
    assert [[name for name, _ in bucket] for bucket in buckets] == expected


def test_a_tensor_whose_partner_never_comes_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="t1 must reach the engine together with t4"):
        list(iter_buckets(tensors(1, 1), 8, in_pairs))


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="--update-weight-buffer-size is 0"):
        list(iter_buckets(tensors(1), 0))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float32"}, torch.float32),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"text_config": {"dtype": "float16"}}, torch.float16),
        ({}, torch.bfloat16),
    ],
)
def test_the_wire_dtype_is_that_of_the_hf_config(config: dict, dtype: torch.dtype) -> None:
    assert wire_dtype(config) is dtype


def test_a_wire_dtype_that_is_no_float_is_refused() -> None:
    with pytest.raises(ConfigError, match="says dtype 'int8'"):
        wire_dtype({"dtype": "int8"})


def test_total_bytes_counts_every_dtype() -> None:
    named = [("w", torch.zeros(2)), ("i", torch.zeros(2, dtype=torch.int32))]
    assert total_bytes(named) == 16


def test_a_plan_lays_whole_tensors_out_without_passing_the_limit_or_parting_a_unit() -> None:
    units = [
        [("a", (10,), torch.float32)],
        [("b", (2, 3), torch.bfloat16), ("b.scale", (1, 1), torch.float32)],
        [("c", (300,), torch.uint8)],
        [("d", (2000,), torch.uint8)],
        [("e", (1,), torch.uint8)],
    ]
    tensors, buckets = plan_buckets(units, 1024)
    assert [[piece.name for piece in bucket.slices] for bucket in buckets] == [
        ["a", "b", "b.scale"],
        ["c"],
        ["d"],
        ["e"],
    ]
    assert [entry.name for entry in tensors] == ["a", "b", "b.scale", "c", "d", "e"]
    assert [piece.offset for piece in buckets[0].slices] == [0, 256, 512]
    assert [bucket.num_bytes for bucket in buckets] == [516, 300, 2000, 1]
    Manifest(tuple(tensors), tuple(buckets))


def test_a_plan_with_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="--update-weight-buffer-size is 0"):
        plan_buckets([], 0)
