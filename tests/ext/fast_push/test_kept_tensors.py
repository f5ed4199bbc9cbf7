"""Tensors that no push carries are read from the engine's checkpoint again when it has slept, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from slime.backends.sglang_utils import cpu_shim
from slime.ext.fast_push import kept_tensors, sglang_plugin
from slime.ext.fast_push.kept_tensors import note_sleep, restore_kept
from slime.ext.fast_push.manifest import TensorEntry
from slime.utils.errors import WeightSyncError

cpu_shim.install()

TABLE = torch.arange(6).reshape(3, 2)
KEPT = (TensorEntry("gate.table", (3, 2), "int64"), TensorEntry("mtp.weight", (2,), "float32"))


class Model(nn.Module):
    """As SGLang's models: its loader skips what the model does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(TABLE.clone(), requires_grad=False)
        self.num_loads = 0

    def load_weights(self, weights: Any) -> None:
        self.num_loads += 1
        loaded: dict[str, Tensor] = dict(weights)
        assert loaded.keys() == {"gate.table", "mtp.weight"}
        self.table.data.copy_(loaded["gate.table"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_file({"gate.table": TABLE, "gate.weight": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"mtp.weight": torch.ones(2)}, tmp_path / "b.safetensors")
    monkeypatch.setattr(kept_tensors, "_checkpoint", lambda: str(tmp_path))
    return tmp_path


def test_kept_tensors_return_once_after_a_sleep(folder: Path) -> None:
    model = Model()
    restore_kept(model, KEPT)
    assert model.num_loads == 0
    for num_loads in (1, 2):
        model.table.data.zero_()  # the memory was unmapped
        note_sleep(None, model, {})
        restore_kept(model, ())  # the draft's push
        restore_kept(model, KEPT)
        restore_kept(model, KEPT)
        assert model.num_loads == num_loads and torch.equal(model.table, TABLE)


def test_a_checkpoint_that_lost_them_is_named_at_every_push(folder: Path) -> None:
    model = Model()
    note_sleep(None, model, {})
    (folder / "b.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(WeightSyncError, match=r"lost 1 tensors .* mtp\.weight, when it slept, and .*cpu-backup"):
            restore_kept(model, KEPT)


def test_sglang_notes_a_sleep_when_the_weights_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler_components import weight_updater

    registered: list[tuple[str, Any, str]] = []
    monkeypatch.setattr(sglang_plugin, "register_hooks", registered.extend)
    sglang_plugin.register()
    (target,) = (target for target, hook, kind in registered if (hook, kind) == (note_sleep, "after"))
    module, name = target.rsplit(".", 1)
    assert module == weight_updater.__name__
    model = Model()
    state = weight_updater._export_static_state(model)
    note_sleep(getattr(weight_updater, name)(model, state), model, state)
    restore_kept(model, ())
    assert vars(model)["_slime_has_slept"]
