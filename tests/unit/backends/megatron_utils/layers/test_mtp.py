"""Multi-token prediction beside the policy: its gradients stay in its layers, and frozen layers do not change.

The matrix checks loss and gradients: families mimo and glm4_moe, in every layout.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.layers.mtp import GPTModelWithMtp
from slime.backends.megatron_utils.model import build_optimizer
from slime.backends.megatron_utils.parameters import iter_shards
from tests.matrix import trainer
from tests.matrix.batch import make_train_data, samples_of
from tests.matrix.case import load_cases, read_tensors
from tests.matrix.parity import one_process_world
from tests.matrix.references.mtp import mtp_losses

CASE = load_cases(["mimo"])["mimo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mimo")
    CASE.write_checkpoint(path)
    return path


@contextmanager
def trained(folder: Path, *flags: object, is_trained: bool = True) -> Iterator[tuple[Namespace, list, list[dict]]]:
    """Args, model with the gradients of one step, and the reports of its micro-batches."""
    with one_process_world():
        args = trainer.make_args(CASE, folder, *flags)
        args.enable_mtp_training = is_trained
        initialize.init(args)
        model = trainer.load_model(args)
        yield args, model, trainer.run_backward(args, model, trainer.prepare(args, make_train_data(CASE.vocab_size)))


def gradients_of(model: list) -> dict[str, torch.Tensor]:
    """Gradients by global name, of the parameters that have one."""
    shards = [shard for shard in iter_shards(model) if shard.parameter.requires_grad]
    return {shard.name: shard.parameter.main_grad.clone() for shard in shards}


def metric(reports: list[dict], name: str) -> float:
    """The mean of a metric over the rollouts of the step."""
    values = [float(report["values"][1 + report["names"].index(name)]) for report in reports]
    return sum(values) / len(set(make_train_data(CASE.vocab_size)["rollout_ids"]))


@pytest.fixture(scope="module")
def without(folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and loss of the model with frozen MTP layers."""
    with trained(folder, is_trained=False) as (_, model, reports):
        assert reports[0]["names"] == ["loss"]
        return gradients_of(model), metric(reports, "loss")


@pytest.mark.parametrize(
    "flags",
    [(), ("--log-probs-chunk-size", 3), ("--max-tokens-per-gpu", 300), ("--data-pad-size-multiplier", 32)],
    ids=["plain", "in chunks of 3 rows", "packed otherwise", "padded otherwise"],
)
def test_the_policy_does_not_notice_that_mtp_is_trained(folder, without, flags):
    gradients, loss = without
    with trained(folder, *flags) as (_, model, reports):
        ours = gradients_of(model)
        assert metric(reports, "loss") == pytest.approx(loss, rel=1e-6)
    assert {name for name in ours if not name.startswith("mtp.")} == set(gradients)
    for name, gradient in gradients.items():
        if not flags:
            assert torch.equal(ours[name], gradient), name
        else:  # the same numbers are summed in another order
            torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5)
    assert all(gradient.any() for name, gradient in ours.items() if name.startswith("mtp."))


def test_the_reported_losses_are_those_of_the_plain_reference(folder):
    reference = CASE.load_reference(folder)
    with torch.no_grad():
        expected = [float(loss) for loss in mtp_losses(reference, samples_of(make_train_data(CASE.vocab_size)))]
    with trained(folder) as (_, _model, reports):
        assert reports[0]["names"] == ["loss", "mtp_loss", "mtp_1_loss", "mtp_2_loss"]
        assert [metric(reports, "mtp_1_loss"), metric(reports, "mtp_2_loss")] == pytest.approx(expected, rel=1e-5)
        assert metric(reports, "mtp_loss") == pytest.approx(sum(expected) / 2, rel=1e-5)
    assert not math.isclose(*expected, rel_tol=1e-3)


def test_frozen_layers_are_not_touched_by_training_and_leave_with_the_others(folder):
    with trained(folder, "--weight-decay", 0.5, "--lr", 0.1, is_trained=False) as (args, model, _reports):
        inner = unwrap_model(model[0])
        assert isinstance(inner, GPTModelWithMtp)
        assert not any(parameter.requires_grad for parameter in inner.mtp.parameters())
        args.use_distributed_optimizer = False
        optimizer = build_optimizer(args, model)
        optimizer.step()
        exported = dict(trainer.export(args, model, dtype=None))
    source = read_tensors(folder)
    moved = {name for name in source if not torch.equal(exported[name], source[name])}
    assert moved == {name for name in source if "mtp_layers" not in name}


def test_a_pass_for_log_probs_does_not_run_the_layers(folder, monkeypatch):
    with one_process_world():
        args = trainer.make_args(CASE, folder)
        initialize.init(args)
        model = trainer.load_model(args)
        load_hf_weights(args, model, folder)
        monkeypatch.setattr(unwrap_model(model[0]).mtp, "forward", None)
        data = trainer.prepare(args, make_train_data(CASE.vocab_size))
        assert len(trainer.response_log_probs(args, model, data)) == len(data["partition"])


def test_a_critic_has_no_mtp_layers(folder):
    from slime.backends.megatron_utils.model_provider import get_model_provider

    with one_process_world():
        args = trainer.make_args(CASE, folder)
        initialize.init(args)
        assert not hasattr(get_model_provider(args, "critic")(), "mtp")
