"""The functions through which plug-ins use the accelerator and its memory, on a machine without one."""

from __future__ import annotations

import pytest
import torch

from slime.utils import accelerator
from slime.utils.errors import ConfigError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's answers")


def test_without_an_accelerator_the_cpu_answers():
    assert accelerator.device_type() == "cpu"
    assert torch.zeros(2, device=accelerator.current_device()).device.type == "cpu"
    assert not accelerator.is_available()
    assert (accelerator.device_count(), accelerator.memory_allocated(), accelerator.mem_get_info()) == (0, 0, (0, 0))
    accelerator.set_device(0)
    accelerator.synchronize()
    accelerator.empty_cache()


def test_what_has_no_name_here_is_torchs():
    assert accelerator.Stream is torch.cpu.Stream
    with pytest.raises(AttributeError, match="no_such_thing"):
        accelerator.no_such_thing  # noqa: B018


def test_the_kind_may_be_named(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cuda")
    assert accelerator.device_type() == "cuda" and not accelerator.is_available()
    monkeypatch.setenv("SLIME_ACCELERATOR", "abacus")
    with pytest.raises(ConfigError, match=r"SLIME_ACCELERATOR is 'abacus'.*no module torch.abacus"):
        accelerator.current_device()
