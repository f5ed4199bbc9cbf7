"""What a trainer says when its memory is not enough."""

from __future__ import annotations

import pickle
from argparse import Namespace

import pytest
import torch

from slime.backends.megatron_utils import memory


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (Namespace(use_dynamic_batch_size=True, max_tokens_per_gpu=16384), "--max-tokens-per-gpu (it is 16384)"),
        (Namespace(use_dynamic_batch_size=False, micro_batch_size=4), "--micro-batch-size (it is 4)"),
    ],
)
def test_an_out_of_memory_error_names_the_flags_also_on_another_process(args: Namespace, flag: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught, memory.naming_flags(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.56 GiB.")
    (note,) = pickle.loads(pickle.dumps(caught.value)).__notes__
    assert flag in note and "--recompute-granularity full" in note and "--fit" in note
