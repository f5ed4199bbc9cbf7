"""The trainer's plug-ins of the same package, on one rank: loss, corrections, advantages, post-processing."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
from slime.flags.hook_checks import check_hooks_on_driver, check_import, named_hooks
from slime.flags.hooks import HOOKS
from tests.plugin_package.product import PLUGIN_FOLDER
from tests.unit.backends.megatron_utils.test_loss import (
    MODEL_FLAGS,
    make_args,
    make_batch,
    make_logits,
    parse,
    run,
    start_single_process,
)

PLUGINS = {
    "--custom-loss-function-path": "loss",
    "--custom-tis-function-path": "truncated_is",
    "--custom-pg-loss-reducer-function-path": "pg_loss_reducer",
    "--custom-advantage-function-path": "advantages",
    "--rollout-data-postprocess-path": "postprocess",
    "--custom-megatron-init-path": "megatron_init",
    "--custom-megatron-before-log-prob-hook-path": "before_log_prob",
    "--custom-megatron-before-train-step-hook-path": "before_train_step",
}


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    start_single_process(parse(*MODEL_FLAGS))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLUGIN_FOLDER)


def path(name: str) -> str:
    return f"calculator_plugin.training.{name}"


def batch_with_columns() -> dict[str, Any]:
    columns = {
        "log_probs": [[-1.0, -1.0], [-1.0] * 4],
        "rollout_log_probs": [[-1.0, -1.2], [-1.0] * 4],
        "advantages": [[1.0, 1.0], [-1.0] * 4],
    }
    return make_batch(**columns)


def test_every_plug_in_passes_the_checks_of_the_flags() -> None:
    chosen = {hook.dest: [] if hook.repeatable else None for hook in HOOKS}
    chosen |= {flag.removeprefix("--").replace("-", "_"): path(name) for flag, name in PLUGINS.items()}
    args = Namespace(**chosen)
    args.eval_datasets = []
    check_hooks_on_driver(args)
    for hook, named, where in named_hooks(args):
        check_import(hook, named, where)


def test_the_loss_is_computed_and_has_a_gradient() -> None:
    batch = batch_with_columns()
    log_probs = [[-0.9, -1.1], [-1.0, -1.0, -1.0, -0.8]]
    logits = make_logits(batch, log_probs)
    args = make_args(loss_type="custom_loss", custom_loss_function_path=path("loss"))
    value, metrics = run(args, batch, logits, loss_type="custom_loss")
    ratios = [[math.exp(new + 1.0) for new in row] for row in log_probs]
    clipped = [[-min(r, 1.28 if r > 1.28 else r) for r in ratios[0]], [max(r, 0.8) for r in ratios[1]]]
    policy = sum(clipped[0]) / 2 + sum(clipped[1]) / 4
    pull = (
        sum((new + 1.0) ** 2 / 2 for new in log_probs[0]) / 2 + sum((new + 1.0) ** 2 / 2 for new in log_probs[1]) / 4
    )
    assert value == pytest.approx(policy + 0.01 * pull, rel=1e-4)
    assert metrics["calculator_pull"] == pytest.approx(pull, rel=1e-3) and metrics["calculator_entropy"] > 0


def test_the_correction_and_the_reducer_take_part_in_the_policy_loss() -> None:
    batch = batch_with_columns()
    logits = make_logits(batch, [[-1.0, -1.0], [-1.0] * 4])
    plain = make_args(use_tis=True, custom_tis_function_path=path("truncated_is"))
    value, metrics = run(plain, batch, logits)
    assert value == pytest.approx(-(1 + math.exp(0.2)) / 2 + 1, rel=1e-4)
    assert metrics["calculator_weight"] == pytest.approx((1 + math.exp(0.2)) / 2 + 1, rel=1e-4)
    value, _ = run(make_args(custom_pg_loss_reducer_function_path=path("pg_loss_reducer")), batch, logits)
    assert value == pytest.approx((-2 + 4) / 16, rel=1e-4)


def test_advantages_and_post_processing_edit_the_data_in_place() -> None:
    from calculator_plugin.training import postprocess

    data: dict[str, Any] = {
        "rewards": [3.0, -1.0],
        "kl": [torch.zeros(2), torch.zeros(4)],
        "log_probs": [torch.zeros(2), torch.zeros(4)],
        "ref_log_probs": None,
        "values": None,
        "response_lengths": [2, 4],
        "total_lengths": [4, 6],
        "loss_masks": [torch.ones(2), torch.ones(4)],
    }
    args = make_args(
        custom_advantage_function_path=path("advantages"),
        normalize_advantages=False,
        gamma=1.0,
        lambd=1.0,
    )
    compute_advantages_and_returns(args, data)
    assert [values.tolist() for values in data["advantages"]] == [[3.0] * 2, [-1.0] * 4]
    postprocess(args, 7, data)
    assert data["advantages"][0].tolist() == [2.0, 2.0] and data["calculator_rollout_id"] == 7
