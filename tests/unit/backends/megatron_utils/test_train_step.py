"""Schedules, errors and offloaded weights of a real model on one rank."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.data import get_data_iterator, prepare_rollout_data
from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.model import build_scheduler, setup_model_and_optimizer
from slime.backends.megatron_utils.policies import ModelSwitch
from slime.backends.megatron_utils.train_metrics import perf_metrics, reduce_step_metrics, rollout_metrics
from slime.backends.megatron_utils.train_step import OptimizerSteps, reset_optimizer_states
from slime.utils.errors import ConfigError, StepError
from tests.dist.trainer_case import cut, make_args, make_train_data, write_model
from tests.unit.backends.megatron_utils.megatron_case import start_single_process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    write_model(folder)
    return folder


def build(folder: Path, *flags: object) -> tuple[Namespace, Any, Any, Any]:
    args = make_args(folder, "--actor-num-gpus-per-node", 1, *flags)
    start_single_process(args)
    return args, *setup_model_and_optimizer(args)


def train(args: Namespace, model: Any, optimizer: Any, scheduler: Any, rollout_id: int = 0) -> list[Any]:
    """Train one rollout; return the results of its steps."""
    parallel = {"dp_size": 1, "cp_size": 1}
    data = prepare_rollout_data(cut(args, make_train_data(), parallel)[0])
    compute_advantages_and_returns(args, data)
    results: list[Any] = []
    steps = OptimizerSteps(args, model, optimizer, scheduler)
    iterators = get_data_iterator(data, 1)
    steps.take(rollout_id, data, iterators, loss_type="policy_loss", on_step=lambda _, result: results.append(result))
    return results


def test_rewards_that_were_not_given_are_in_no_mean(folder):
    args, *_ = build(folder)
    batch = make_train_data()
    count = len(batch["rewards"])
    batch["graded"] = [place > 0 for place in range(count)]
    batch |= {"rewards": [-9.0] + [0.5] * (count - 1), "raw_reward": [-9.0] + [2.0] * (count - 1)}
    data = prepare_rollout_data(cut(args, batch, {"dp_size": 1, "cp_size": 1})[0])
    metrics = rollout_metrics(data, per_token=False, has_rewards=True)
    assert (metrics["rollout/rewards"], metrics["rollout/raw_reward"]) == (0.5, 2.0)
    data.graded = [False] * count
    assert not any("reward" in name for name in rollout_metrics(data, per_token=False, has_rewards=True))


def test_the_passes_of_all_frozen_policies_count_as_work(folder: Path) -> None:
    args, *_ = build(folder)
    data = prepare_rollout_data(cut(args, make_train_data(), {"dp_size": 1, "cp_size": 1})[0])
    (iterator,) = get_data_iterator(data, 1)

    def speed(num_passes: int) -> float:
        counts = {"frozen_passes": {"other_log_probs": num_passes}, "max_tokens_per_gpu": None, "world_size": 1}
        metrics = perf_metrics(data, iterator, {"other_log_probs": 2.0}, dims=model_dims(args), **counts)
        return metrics["perf/other_log_probs_tflops"]

    assert speed(1) > 0
    assert speed(2) == pytest.approx(2 * speed(1))


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model[0].named_parameters()}


def test_the_schedule_counts_samples_and_flags_count_steps(folder: Path) -> None:
    flags = ("--lr-decay-style", "linear", "--lr-warmup-iters", 2, "--min-lr", 0, "--lr-decay-iters", 6)
    args, model, optimizer, scheduler = build(folder, *flags)
    rates = []
    for _ in range(7):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=args.global_batch_size)
    assert rates == pytest.approx([0, 0.5e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3, 0])


def test_a_step_reports_the_learning_rate_that_it_took(folder: Path) -> None:
    args, model, optimizer, scheduler = build(folder, "--lr-warmup-iters", 2, "--lr-decay-iters", 6)
    results = [one for rollout_id in range(3) for one in train(args, model, optimizer, scheduler, rollout_id)]
    assert [one.learning_rates[0] for one in results[:3]] == pytest.approx([0, 0.5e-3, 1e-3])


def test_a_warm_up_longer_than_the_decay_is_refused(folder: Path) -> None:
    args, _, optimizer, _ = build(folder)
    with pytest.raises(ConfigError, match="warms up for 4 of 4 optimizer steps; lower --lr-warmup-iters"):
        build_scheduler(Namespace(**{**vars(args), "lr_warmup_iters": 4}), optimizer)


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(folder: Path) -> None:
    args, model, optimizer, scheduler = build(folder)
    with torch.no_grad():
        next(p for name, p in model[0].named_parameters() if "final_layernorm" in name).fill_(float("nan"))
    before = parameters(model)
    with pytest.raises(StepError, match="rollout 3, optimizer step 0: the loss is nan on rank 0"):
        train(args, model, optimizer, scheduler, rollout_id=3)
    assert all(torch.equal(value, before[name]) or value.isnan().any() for name, value in parameters(model).items())


def test_without_the_check_such_a_step_is_skipped(folder: Path) -> None:
    args, model, optimizer, scheduler = build(folder, "--on-nan", "skip")
    with torch.no_grad():
        next(p for name, p in model[0].named_parameters() if "final_layernorm" in name).fill_(float("nan"))
    before = parameters(model)
    (result,) = train(args, model, optimizer, scheduler)
    assert not result.is_applied and result.not_finite_ranks == (0,)
    assert scheduler.num_steps == 0, "nor does the learning rate move"
    assert all(torch.equal(value, before[name]) or value.isnan().any() for name, value in parameters(model).items())


def test_two_steps_a_rollout_split_its_samples(folder: Path) -> None:
    args, model, optimizer, scheduler = build(folder, "--global-batch-size", 4)
    results = train(args, model, optimizer, scheduler)
    assert len(results) == 2
    assert results[0].grad_norm != results[1].grad_norm
    assert scheduler.num_steps == 8, "the schedule counts samples: four in each step"


def test_resetting_the_optimizer_zeroes_its_moments_and_its_step(folder: Path) -> None:
    args, model, optimizer, scheduler = build(folder)
    train(args, model, optimizer, scheduler)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [state for part in parts for state in part.optimizer.state.values()]
    assert any(state["exp_avg"].any() for state in states)
    nothing_to_train = Namespace(optimizer=None, is_stub_optimizer=True)  # as on a rank with only frozen parameters
    reset_optimizer_states(Namespace(chained_optimizers=[*parts, nothing_to_train]))
    assert not any(state["exp_avg"].any() or state["exp_avg_sq"].any() for state in states)
    assert all(float(state["step"]) == 0 for state in states)


def test_resetting_reaches_moments_on_the_host_that_a_checkpoint_has_just_given() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    on_host = HybridDeviceOptimizer(
        [{"params": [weight]}], offload_fraction=1.0, cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW, overlap_cpu_optimizer_d2h_h2d=False,
    )  # fmt: skip
    (adam,) = on_host.sub_optimizers
    names = "exp_avg", "exp_avg_sq", "step"
    adam.state[weight] = {name: torch.ones(()) for name in names}  # Adam has no state before a step
    reset_optimizer_states(Namespace(optimizer=on_host))
    assert [float(adam.state[weight][name]) for name in names] == [0, 0, 0]


def test_a_switch_to_the_reference_and_back_does_not_disturb_training(folder: Path) -> None:
    plain = build(folder)
    expected = [train(*plain, rollout_id=i)[0].metrics["loss"] for i in range(2)], parameters(plain[1])
    args, model, optimizer, scheduler = build(folder)
    switch = ModelSwitch(model)
    switch.backup("actor")
    switch.copy("actor", "ref")
    losses = []
    for rollout_id in range(2):
        switch.switch_to("ref")
        switch.switch_to("actor")
        losses.append(train(args, model, optimizer, scheduler, rollout_id)[0].metrics["loss"])
        switch.backup("actor")
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert all(torch.equal(value, expected[1][name]) for name, value in parameters(model).items())


def test_metrics_of_micro_batches_are_summed_then_divided() -> None:
    reports = [
        {"names": ["loss"], "values": torch.tensor([3.0, 1.0])},
        {"names": ["loss"], "values": torch.tensor([5.0, 2.0])},
    ]
    settings = {"step_global_batch_size": 4, "cp_size": 1, "group": None}
    assert reduce_step_metrics(reports, per_token=False, **settings) == {"loss": 0.75}
    assert reduce_step_metrics(reports, per_token=True, **settings) == {"loss": 3 / 8}
