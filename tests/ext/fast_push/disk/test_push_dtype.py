"""A disk push has the engines' compute dtype, whatever the checkpoint's config.json says."""

from __future__ import annotations

import json
import logging
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.model import build_model
from slime.backends.megatron_utils.update_weight.updater import WeightUpdater
from slime.ext.fast_push.verified_push import VerifiedPush
from tests.ext.fast_push.dist.disk_engine import DiskEngine
from tests.matrix.case import write_bf16_copy
from tests.unit.backends.megatron_utils.megatron_case import hf_flags, parse, start_single_process, write_hf_model

NORM = "model.norm.weight"


class Job:
    """A trainer of one process, and one engine that reads what it writes."""

    def __init__(self, root: Path, *, checkpoint: str, trainer: str, engine: str, mode: str = "full") -> None:
        folder = root / "model"
        write_hf_model(root / "fp32", "qwen3")
        if checkpoint == "float32":
            shutil.copytree(root / "fp32", folder)
        else:
            write_bf16_copy(root / "fp32", folder)
        args = parse(*hf_flags(folder), "--fp32" if trainer == "float32" else "--bf16")
        local = root / "host" if mode == "delta" else None
        self.args = Namespace(
            **{
                **vars(args),
                "update_weight_transport": "disk",
                "update_weight_mode": mode,
                "update_weight_disk_dir": str(root / "versions"),
                "update_weight_local_checkpoint_dir": str(local) if local else None,
                "update_weight_disk_keep_files": True,
                "update_weight_start_version": 0,
                "weight_update_timeout_s": 30,
                "check_weight_update_equal": False,
                "weight_push": "verified",
                "update_weight_delta_encoding": "xor",
                "update_weight_delta_checksum": "xxh3-128",
            }
        )
        start_single_process(self.args)
        self.model = build_model(self.args)
        load_hf_weights(self.args, self.model, str(folder))
        config = json.loads((folder / "config.json").read_text())
        assert config["dtype"] == checkpoint
        self.updater = WeightUpdater(
            self.args, self.model, lambda: None, hf_config=config, make_transport=VerifiedPush.of
        )
        self.engine = DiskEngine(0, local=local, shared=root / "versions", model=folder)
        self.engine.dtype = engine
        self.updater.connect([self.engine], 1)

    def norm(self) -> torch.Tensor:
        return next(p for name, p in self.model[0].named_parameters() if name.endswith("final_layernorm.weight"))

    def step(self, by: float = 1e-5) -> None:
        with torch.no_grad():
            for parameter in self.model[0].parameters():
                parameter.mul_(1 + by)


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize(
    ("checkpoint", "trainer", "engine"),
    [
        ("bfloat16", "float32", ""),
        ("float32", "float32", "bfloat16"),
    ],
)
def test_what_is_pushed_has_the_precision_of_the_engines(
    tmp_path: Path, checkpoint: str, trainer: str, engine: str, mode: str
) -> None:
    job = Job(tmp_path, checkpoint=checkpoint, trainer=trainer, engine=engine, mode=mode)
    for _ in range(2):
        job.step(1e-3)
        job.updater.push()
        sent = getattr(torch, engine or trainer)
        held = job.norm().detach().to(sent).contiguous().view(torch.uint8)
        assert job.engine.held[NORM] == held.numpy().tobytes()
    assert not job.engine.is_paused


def test_an_fp32_job_loses_nothing_of_a_step_to_a_bf16_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, checkpoint="bfloat16", trainer="float32", engine="")
    job.updater.push()
    before = job.engine.held[NORM]
    caplog.clear()
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, logger="slime.ext.fast_push.push"):
        job.step(1e-5)
        report = job.updater.push()
        job.updater.resend()
    levels = [one.levelname for one in caplog.records if one.getMessage().startswith("Pushed weight version")]
    assert levels == ["DEBUG", "INFO"], "the second push, and one for engines that missed it"
    assert job.engine.held[NORM] != before
    assert "perf/weight_push_lost_share" not in report.metrics
    assert "compute in" not in caplog.text
