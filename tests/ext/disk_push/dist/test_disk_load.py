"""SGLang's own model takes weights from disk, changes included, and vouches for what it then holds."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "dist"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from disk_model import Pusher
from trainer_case import write_model

from slime.utils.errors import WeightSyncError
from slime.weights.digest import combine, digest_bytes
from slime.weights.manifest import Manifest
from slime.weights.stored_tensors import STORED_DTYPES, read_layout
from tests.loaded_model.buckets import whole_buckets
from tests.loaded_model.engine import LoadedModel

pytestmark = pytest.mark.dist

TORCH_DTYPES = {stored: getattr(torch, name) for name, stored in STORED_DTYPES.items()}


class Trained(Pusher):
    """A pusher of a real model."""

    def change(self) -> None:
        for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight"):
            data = self.current[name]
            data.view(np.float32)[::3] *= 1.5

    def manifest(self) -> Manifest:
        stored = read_layout(self.model)
        tensors = {
            name: torch.empty(stored[name].shape, dtype=TORCH_DTYPES[stored[name].dtype]) for name in self.current
        }
        return whole_buckets(tensors, 3)

    def digests(self) -> list[str]:
        """Of the trainer's own bytes."""
        return [
            f"{combine(digest_bytes(torch.from_numpy(self.current[piece.name])) for piece in bucket.slices):016x}"
            for bucket in self.manifest().buckets
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LoadedModel]:
    with LoadedModel(model, tp_size=2, dtype="float32") as engine:
        yield engine


@pytest.fixture
def pusher(engine: LoadedModel, model: Path, tmp_path: Path) -> Trained:
    engine.args = Namespace(
        weight_update_timeout_s=60, update_weight_local_checkpoint_dir=str(tmp_path / "local"),
        update_weight_disk_dir=str(tmp_path / "shared"), hf_checkpoint=str(model),
        sglang_custom_pull_weights_pre_read_hook=None,
    )  # fmt: skip
    return Trained(model, tmp_path / "shared")


def test_changes_reach_both_ranks_of_a_real_model(engine: LoadedModel, pusher: Trained) -> None:
    for number in (1, 2):
        pusher.change()
        pusher.push()
        folder = engine.pull_weights(number)
        engine.begin_weight_update(pusher.manifest().id, f"push {number}", pusher.manifest().to_json())
        engine.receive_weight_folder(f"push {number}", folder)
        answer = engine.acknowledge_weight_update(f"push {number}")
        del answer["seconds"]
        assert answer == {"push_id": f"push {number}", "buckets": pusher.digests(), "problems": []}
        embedding = pusher.current["model.embed_tokens.weight"].view(np.float32)
        held = torch.cat([rank["model.embed_tokens.weight"] for rank in engine.parameters()])
        stored = read_layout(pusher.model)["model.embed_tokens.weight"]
        expected = torch.from_numpy(embedding.copy()).view(stored.shape)
        assert torch.equal(held[: len(expected)], expected)
        engine.commit_weight_update(f"push {number}", str(number))


def test_a_copy_that_was_damaged_unseen_is_not_acknowledged_as_the_trainers(
    engine: LoadedModel, pusher: Trained
) -> None:
    pusher.change()
    pusher.push()
    folder = engine.pull_weights(1)
    stored = read_layout(folder)["model.norm.weight"]  # it did not change, so that no checksum covers it
    content = bytearray(stored.file.read_bytes())
    content[stored.begin] ^= 1
    stored.file.write_bytes(content)
    engine.begin_weight_update(pusher.manifest().id, "push", pusher.manifest().to_json())
    engine.receive_weight_folder("push", folder)
    held, sent = engine.acknowledge_weight_update("push")["buckets"], pusher.digests()
    assert [index for index in range(3) if held[index] != sent[index]] == [
        index for index, bucket in enumerate(pusher.manifest().buckets)
        if "model.norm.weight" in {piece.name for piece in bucket.slices}
    ]  # fmt: skip
    engine.pull_weights(1, rebuild=True)
    engine.begin_weight_update(pusher.manifest().id, "again", pusher.manifest().to_json())
    engine.receive_weight_folder("again", folder)
    assert engine.acknowledge_weight_update("again")["buckets"] == sent


def test_a_folder_of_another_model_is_a_problem_that_names_the_tensor(engine: LoadedModel, pusher: Trained) -> None:
    pusher.change()
    changes = pusher.push()
    engine.begin_weight_update(pusher.manifest().id, "push", pusher.manifest().to_json())
    engine.receive_weight_folder("push", str(changes))  # the changes themselves, not a copy they were applied to
    answer = engine.acknowledge_weight_update("push")
    assert "on disk is" in " ".join(answer["problems"])
    with pytest.raises(WeightSyncError, match="has not acknowledged"):
        engine.commit_weight_update("push", "1")
