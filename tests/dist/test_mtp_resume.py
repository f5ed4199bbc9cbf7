"""A run with MTP layers, trained or frozen, resumes under another layout as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.matrix.pool import run_ranks

pytestmark = pytest.mark.dist

PP2 = ("--pipeline-model-parallel-size", 2, "--decoder-last-pipeline-num-layers", 1)
TP2 = ("--tensor-model-parallel-size", 2, "--sequence-parallel")


def train(hf: str, save: str, flags: tuple[object, ...], *, trains_mtp: bool, resumes: bool) -> list[dict[str, float]]:
    """Results of steps 0 to 3, with a save in the middle; or of steps 2 and 3 of a run that loads it."""
    import torch.distributed as dist

    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.checkpoint import load_checkpoint, publish_checkpoint, save_checkpoint
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.model import build_model, build_optimizer, build_scheduler
    from slime.backends.megatron_utils.train_step import OptimizerSteps
    from tests.matrix import trainer
    from tests.matrix.batch import make_train_data
    from tests.matrix.case import load_cases

    case = load_cases(["mimo"])["mimo"]
    load = save if resumes else hf
    args = trainer.make_args(case, Path(hf), *flags, "--load", load, "--save", save, world_size=dist.get_world_size())
    args.enable_mtp_training = trains_mtp
    initialize.init(args)
    model = build_model(args)
    optimizer = build_optimizer(args, model)
    scheduler = build_scheduler(args, optimizer)
    load_checkpoint(args, model, optimizer, scheduler)
    data = trainer.prepare(args, make_train_data(case.vocab_size))
    figures: list[dict[str, float]] = []

    def two_steps() -> None:
        for _ in range(2):
            OptimizerSteps(args, model, optimizer, scheduler).take(
                0, data, get_data_iterator(data, len(model)), loss_type=args.loss_type,
                on_step=lambda _, result: figures.append({**result.metrics, "grad_norm": result.grad_norm}),
            )  # fmt: skip

    two_steps()
    if not resumes:
        save_checkpoint(args, 1, model, optimizer, scheduler)
        dist.barrier()
        if dist.get_rank() == 0:
            publish_checkpoint(save, 1)
        two_steps()
    return figures


def main(hf: str, save: str, flags: tuple[object, ...], trains_mtp: bool, resumes: bool) -> Any:
    return train(hf, save, flags, trains_mtp=trains_mtp, resumes=resumes)


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.matrix.case import load_cases

    folder = tmp_path_factory.mktemp("hf")
    load_cases(["mimo"])["mimo"].write_checkpoint(folder)
    return str(folder)


@pytest.mark.parametrize("trains_mtp", [True, False], ids=["trained", "frozen"])
def test_two_stages_go_on_as_two_tensor_ranks(hf_folder: str, tmp_path: Path, trains_mtp: bool) -> None:
    saved = str(tmp_path / "saved")
    expected = run_ranks(main, 2, hf_folder, saved, PP2, trains_mtp, False)[1][2:]
    resumed = run_ranks(main, 2, hf_folder, saved, TP2, trains_mtp, True)[1]
    assert [figures.keys() for figures in resumed] == [figures.keys() for figures in expected]
    assert ("mtp_loss" in expected[0]) == trains_mtp
    for figures, wanted in zip(resumed, expected, strict=True):
        assert figures == pytest.approx(wanted, rel=1e-4)
