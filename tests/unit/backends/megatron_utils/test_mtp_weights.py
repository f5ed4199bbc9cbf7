"""The MTP layers of a checkpoint: the names under which they are found, and their copies of shared tensors."""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.checkpoint import save_checkpoint
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.model import build_model
from tests.matrix import trainer
from tests.matrix.case import Tensors, load_cases, read_tensors, write_tensors
from tests.matrix.parity import one_process_world
from tools import convert_torch_dist_to_hf

CASE = load_cases(["glm4_moe-groups"])["glm4_moe-groups"]
EMBEDDING_COPY, HEAD_COPY = "model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CASE.write_checkpoint(tmp_path)
    return tmp_path


def load_and_export(folder: Path) -> Tensors:
    with one_process_world():
        args = trainer.make_args(CASE, folder)
        initialize.init(args)
        return dict(trainer.export(args, trainer.load_model(args), dtype=None))


def test_the_export_has_the_copies_that_its_source_has(folder: Path) -> None:
    source = read_tensors(folder)
    assert {EMBEDDING_COPY, HEAD_COPY} <= source.keys()
    assert load_and_export(folder).keys() == source.keys()


def test_a_copy_that_differs_is_reported_and_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = read_tensors(folder)
    write_tensors(folder, source | {HEAD_COPY: source[HEAD_COPY] + 1})
    with caplog.at_level(logging.WARNING):
        exported = load_and_export(folder)
    assert [HEAD_COPY in record.getMessage() for record in caplog.records if "copy" in record.getMessage()] == [True]
    assert torch.equal(exported[HEAD_COPY], source["lm_head.weight"])


def test_layers_that_are_not_built_leave_their_tensors_alone(folder: Path) -> None:
    with one_process_world():
        args: Namespace = trainer.make_args(CASE, folder, "--mtp-num-layers", 0)
        initialize.init(args)
        exported = dict(trainer.export(args, trainer.load_model(args), dtype=None))
    assert exported.keys() == {name for name in read_tensors(folder) if not name.startswith("model.layers.3.")}


@pytest.mark.parametrize(
    "family", ["glm4_moe-groups", "deepseek_v3", "glm4_moe_lite", "mimo", "qwen3_next", "qwen3_5_moe"]
)
def test_every_export_of_a_model_without_the_mtp_layers_has_those_of_its_source(family: str, tmp_path: Path) -> None:
    case, source = load_cases([family])[family], tmp_path / "hf"
    case.write_checkpoint(source)
    flags = [word for word in case.flags(source) if word != "--enable-mtp-training"]
    with one_process_world():
        args = trainer.make_args(
            replace(case, flags=lambda _: flags), source, "--mtp-num-layers", 0, "--save", tmp_path / "dist"
        )
        initialize.init(args)
        model = build_model(args, wrap_with_ddp=False)
        load_hf_weights(args, model, source)
        save_hf_model_to_path(args, tmp_path / "saved", model)
        folder = save_checkpoint(args, "release", model, None, None)
    convert = ("--input-dir", folder, "--output-dir", tmp_path / "converted", "--origin-hf-dir", source)
    convert_torch_dist_to_hf.convert(convert_torch_dist_to_hf.parse([str(word) for word in convert]))
    before = read_tensors(source)
    for written in ("saved", "converted"):
        after = read_tensors(tmp_path / written)
        assert after.keys() == before.keys(), written
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), written
