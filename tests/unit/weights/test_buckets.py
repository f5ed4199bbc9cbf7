import pytest
import torch

from slime.utils.errors import WeightSyncError
from slime.weights.buckets import iter_units
from slime.weights.named_tensors import config_dtype, pushed_dtype


def in_pairs(name: str) -> tuple[str, ...]:
    """t1 and t4 belong together, and so do t5 and t6."""
    return next((pair for pair in (("t1", "t4"), ("t5", "t6")) if name in pair), ())


def test_tensors_that_belong_together_are_never_parted() -> None:
    units = iter_units(((f"t{index}", index) for index in range(7)), in_pairs)
    assert [[index for _, index in unit] for unit in units] == [[0], [2], [3], [1, 4], [5, 6]]


def test_a_tensor_whose_partner_never_comes_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="t1 must reach the engine together with t4"):
        list(iter_units([("t0", 0), ("t1", 1)], in_pairs))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float32"}, torch.float32),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"text_config": {"dtype": "float16"}}, torch.float16),
        ({}, torch.bfloat16),
    ],
)
def test_the_dtype_of_a_checkpoint_is_that_of_its_config(config: dict, dtype: torch.dtype) -> None:
    assert config_dtype(config) is dtype


@pytest.mark.parametrize(
    ("engines", "trainer", "pushed"),
    [
        ([], torch.float32, torch.float32),
        ([""], torch.bfloat16, torch.bfloat16),
        (["bfloat16"], torch.float32, torch.bfloat16),
        (["float32"], torch.bfloat16, torch.float32),
        (["half", "float16"], torch.bfloat16, torch.float16),
        (["bfloat16", "", "bfloat16"], torch.float32, torch.float32),
        (["bfloat16", "float16"], torch.bfloat16, torch.float32),
    ],
)
def test_a_push_has_the_dtype_of_the_engines_the_widest_of_them(
    engines: list[str], trainer: torch.dtype, pushed: torch.dtype
) -> None:
    assert pushed_dtype(engines, trainer) is pushed
