"""MTP layers on CUDA: losses and gradients against the plain reference, in fp32, and in bf16 with full recompute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils import initialize
from tests.matrix import trainer
from tests.matrix.batch import make_train_data, reference_loss, samples_of
from tests.matrix.case import gradients_by_checkpoint_name, load_cases
from tests.matrix.parity import gradient_errors, one_process_world
from tests.matrix.references.mtp import mtp_losses

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)


@pytest.mark.parametrize(
    ("family", "flags", "loss_bound", "gradient_bound"),
    [
        ("mimo", (), 1e-5, 1e-4),
        ("glm4_moe", (), 1e-5, 1e-4),
        # Without experts, whose choice bf16 would change.
        ("mimo", ("--bf16", *RECOMPUTE, "--log-probs-chunk-size", 16), 2e-2, 8e-2),
    ],
    ids=["dense", "experts", "bf16, recomputed, in chunks"],
)
def test_losses_and_gradients_equal_those_of_the_reference(
    tmp_path: Path, family: str, flags: tuple[object, ...], loss_bound: float, gradient_bound: float
) -> None:
    case = load_cases([family])[family]
    case.write_checkpoint(tmp_path)
    data = make_train_data(case.vocab_size)
    reference = case.load_reference(tmp_path)
    loss, _ = reference_loss(case, reference, data)
    loss.backward()
    expected = gradients_by_checkpoint_name(reference)
    losses = [float(value) for value in mtp_losses(reference, samples_of(data))]
    with one_process_world():
        args = trainer.make_args(case, tmp_path, *flags)
        initialize.init(args)
        model = trainer.load_model(args)
        reports = trainer.run_backward(args, model, trainer.prepare(args, data))
        actual = {name: tensor.cpu().float() for name, tensor in trainer.model_gradients(args, model).items()}
    for depth, value in enumerate(losses, start=1):
        column = 1 + reports[0]["names"].index(f"mtp_{depth}_loss")
        measured = sum(float(report["values"][column]) for report in reports) / len(set(data["rollout_ids"]))
        assert measured == pytest.approx(value, rel=loss_bound)
    own = {name: error for name, error in gradient_errors(actual, expected).items() if _is_mtp(name, case.config)}
    wrong = {name: error for name, error in own.items() if error > gradient_bound}
    assert own and not wrong, wrong


def _is_mtp(name: str, config: object) -> bool:
    assert isinstance(config, dict)
    return "mtp_layers" in name or name.startswith(f"model.layers.{config['num_hidden_layers']}.")
