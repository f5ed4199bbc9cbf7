"""A trained vision tower with its own learning rates: its step, its schedule, and resumed runs."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.checkpoint import load_checkpoint, save_checkpoint
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.model import build_model, build_optimizer, build_scheduler
from slime.compose import parts
from slime.ray.parts import load_all
from slime.utils.errors import ConfigError, DataError
from tests.matrix import trainer
from tests.matrix.batch import make_train_data
from tests.matrix.families.qwen3_vl import CASE
from tests.matrix.parity import one_process_world

FACTOR = 0.25
"""A power of two, so that products with it are exact."""
SCHEDULE = ("--lr", 1e-2, "--min-lr", 1e-3, "--lr-decay-style", "cosine", "--lr-warmup-iters", 2)


class Job:
    """A trainer of one process whose weights begin at zero, so that after a step they equal the step."""

    def __init__(self, folder: Path, factor: float, *flags: object) -> None:
        self.args: Namespace = trainer.make_args(CASE, folder, "--vision-tower-lr-mult", factor, *SCHEDULE, *flags)
        initialize.init(self.args)
        self.model = build_model(self.args, transforms=load_all(parts(self.args).transforms))
        load_hf_weights(self.args, self.model, str(folder))
        self.optimizer = build_optimizer(self.args, self.model)
        self.scheduler = build_scheduler(self.args, self.optimizer)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in unwrap_model(self.model)[0].named_parameters()}

    def step(self, data: Any) -> None:
        self.scheduler.step(self.args.global_batch_size)
        trainer.run_backward(self.args, self.model, trainer.prepare(self.args, data))
        assert self.optimizer.step()[0]

    def start_at_zero(self, data: Any) -> dict[str, torch.Tensor]:
        """The weights after a step from zero with the gradients of the checkpoint's weights."""
        trainer.run_backward(self.args, self.model, trainer.prepare(self.args, data))
        with torch.no_grad():
            for parameter in unwrap_model(self.model)[0].parameters():
                parameter.zero_()
        self.optimizer.reload_model_params()
        self.scheduler.step(self.args.global_batch_size)
        assert self.optimizer.step()[0]
        return self.weights()

    def resume(self, checkpoint: Path) -> None:
        self.args.load = str(checkpoint)
        self.args.finetune = self.args.no_load_optim = self.args.no_load_rng = False
        load_checkpoint(self.args, self.model, self.optimizer, self.scheduler)

    def rates(self) -> dict[float, set[float]]:
        rates: dict[float, set[float]] = {}
        for group in self.optimizer.param_groups:
            rates.setdefault(group["lr_mult"], set()).add(group["lr"])
        return rates


@pytest.fixture
def data() -> dict[str, Any]:
    return make_train_data(CASE.vocab_size, add_images=CASE.add_images)


def test_the_towers_step_is_the_factor_times_what_it_is_without(tmp_path: Path, data: dict[str, Any]) -> None:
    CASE.write_checkpoint(tmp_path)
    with one_process_world():
        plain = Job(tmp_path, 1.0).start_at_zero(data)
    with one_process_world():
        found = Job(tmp_path, FACTOR).start_at_zero(data)
    for name, step in plain.items():
        assert torch.equal(found[name], step * (FACTOR if name.startswith("vision_model.") else 1.0)), name
    assert any(step.any() for name, step in plain.items() if name.startswith("vision_model."))


def test_a_resumed_run_goes_on_as_the_one_that_was_not_interrupted(tmp_path: Path, data: dict[str, Any]) -> None:
    CASE.write_checkpoint(tmp_path / "hf")
    flags = ("--save", tmp_path / "run", "--save-interval", 1)
    with one_process_world():
        job = Job(tmp_path / "hf", FACTOR, *flags)
        job.step(data)
        saved = save_checkpoint(job.args, 0, job.model, job.optimizer, job.scheduler)
        job.step(data)
        expected, rates = job.weights(), job.rates()
    with one_process_world():
        again = Job(tmp_path / "hf", FACTOR, *flags)
        again.resume(saved)
        again.step(data)
        assert again.rates() == rates
        assert all(torch.equal(weight, expected[name]) for name, weight in again.weights().items())
    with one_process_world():
        other = Job(tmp_path / "hf", 0.5, *flags)
        with pytest.raises(DataError, match=r"'lr_mult': 0.5.*--\*-lr-mult of the run that saved it"):
            other.resume(saved)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lr-warmup-init", 1e-5), r"--vision-tower-lr-mult is 0.25 and --lr-warmup-init 1e-05, .* drop one"),
        (("--vision-tower-lr-mult", 0), r"--vision-tower-lr-mult"),
    ],
)
def test_a_factor_that_cannot_hold_is_refused(
    tmp_path: Path, flags: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    CASE.write_checkpoint(tmp_path)
    with pytest.raises((ConfigError, SystemExit)) as caught:
        trainer.make_args(CASE, tmp_path, "--vision-tower-lr-mult", FACTOR, *SCHEDULE, *flags)
    assert re.search(message, str(caught.value) + capsys.readouterr().err)
