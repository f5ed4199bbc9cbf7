"""The trainer's message when memory runs out."""

from __future__ import annotations

import pickle

import pytest
import torch

from slime.backends.megatron_utils import memory


def test_an_out_of_memory_error_names_the_flags_also_on_another_process() -> None:
    flag = "--micro-batch-size (it is 4)"
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught, memory.naming_flags(flag):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.56 GiB.")
    (note,) = pickle.loads(pickle.dumps(caught.value)).__notes__
    assert flag in note and "--recompute-granularity full" in note and "--fit" in note
