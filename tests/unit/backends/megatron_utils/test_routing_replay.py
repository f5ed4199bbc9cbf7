"""Routing replay: bitwise equal if the router is unchanged, else equal to a plain model with given ids."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.forward import forward_only
from slime.backends.megatron_utils.layers.router import Router
from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy
from slime.backends.megatron_utils.routing_replay import RoutingReplay
from slime.backends.megatron_utils.train_step import accumulate_gradients
from slime.utils.errors import DataError, SlimeError
from tests.matrix import trainer
from tests.matrix.batch import make_train_data, samples_of
from tests.matrix.case import FamilyCase, gradients_by_checkpoint_name, load_cases, reference_logits
from tests.matrix.comparisons import gradient_errors
from tests.matrix.parity import GRADIENT_BOUND, LOG_PROB_BOUND, one_process_world
from tests.matrix.replay import (
    iterators_of,
    old_log_probs,
    replay_of,
    replayed_backward,
    routed_train_data,
    turn_routers_round,
)

FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
CASES = load_cases(["qwen3_moe", "deepseek_v3", "glm4_moe"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    result = {}
    for name in ("qwen3_moe", "deepseek_v3", "glm4_moe"):
        result[name] = tmp_path_factory.mktemp(name)
        CASES[name].write_checkpoint(result[name])
    return result


@contextmanager
def trainer_of(folder: Path, name: str, *flags: object) -> Iterator[tuple[Namespace, list[torch.nn.Module]]]:
    with one_process_world():
        args = trainer.make_args(CASES[name], folder, *flags)
        initialize.init(args)
        yield args, trainer.load_model(args)


def buffers(model: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    return {n: p.main_grad.clone() for n, p in model[0].named_parameters() if hasattr(p, "main_grad")}


def losses(reports: Sequence[dict[str, Any]]) -> list[list[float]]:
    return [report["values"].tolist() for report in reports]


@pytest.mark.parametrize(
    ("family", "flags"),
    [("qwen3_moe", ()), ("qwen3_moe", FULL), ("deepseek_v3", SELECTIVE), ("glm4_moe", FULL)],
    ids=["qwen3_moe", "recomputed", "grouped, experts recomputed", "with MTP, recomputed"],
)
def test_experts_recorded_from_the_same_weights_change_no_bit(
    folders: dict[str, Path], family: str, flags: tuple[object, ...]
) -> None:
    with trainer_of(folders[family], family, "--use-routing-replay", *flags) as (args, model):
        data = trainer.prepare(args, make_train_data(CASES[family].vocab_size))
        expected = losses(trainer.run_backward(args, model, data)), buffers(model)
        free = trainer.response_log_probs(args, model, data)
        replay = replay_of(args, model)
        replay.begin(data)
        assert all(map(torch.equal, old_log_probs(args, model, data, replay), free))
        assert losses(replayed_backward(args, model, data, replay)) == expected[0]
        assert all(torch.equal(gradient, expected[1][name]) for name, gradient in buffers(model).items())
        assert replay.take_metrics() == {"routing_replay_changed": 0.0}


# A plain model with given experts


def tell_qwen(model: torch.nn.Module, rows_of_layer: Callable[[int], Tensor]) -> None:
    """Softmax over all experts, then over the chosen ones."""

    def forward(gate: Any, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.size(-1)) @ gate.weight.t()
        ids = rows_of_layer(layer)
        chosen = logits.softmax(-1).gather(1, ids)
        return logits, chosen / chosen.sum(-1, keepdim=True), ids

    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "gate"):
            block.mlp.gate.forward = partial(forward, block.mlp.gate, layer)


def tell_deepseek(model: torch.nn.Module, rows_of_layer: Callable[[int], Tensor]) -> None:
    """Sigmoid scores without the bias, normalized over the chosen ones; no groups."""

    def route(moe: Any, layer: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        ids = rows_of_layer(layer)
        chosen = logits.sigmoid().gather(1, ids)
        return ids, chosen / chosen.sum(-1, keepdim=True) * moe.routed_scaling_factor

    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "gate"):
            block.mlp.route_tokens_to_experts = partial(route, block.mlp, layer)


TELL = {"qwen3_moe": tell_qwen, "deepseek_v3": tell_deepseek}


def told_reference(
    case: FamilyCase, folder: Path, data: dict[str, Any], *, of: Sequence[int] | None = None, turned: bool = False
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Every sample's log-probs, and gradients of the supervised loss of samples ``of``, with the data's experts."""
    model = case.load_reference(folder)
    if turned:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    parameter.neg_()
    current: dict[str, Tensor] = {}
    # Engines do not report the last token's experts, and nothing depends on them.
    TELL[case.name](model, lambda layer: torch.cat([current["rows"], current["rows"][-1:]])[:, layer].long())
    log_probs, loss = [], torch.zeros(())
    for index, sample in enumerate(samples_of(data)):
        current["rows"] = data["rollout_routed_experts"][index]
        tokens, mask = sample["tokens"], sample["mask"]
        log_prob = reference_logits(model, tokens)[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0][-len(mask) :]
        log_probs.append(log_prob.detach())
        if of is None or index in of:
            loss = loss - sample["weight"] * (log_prob * mask).sum()
    loss.backward()
    return log_probs, gradients_by_checkpoint_name(model)


@pytest.mark.parametrize("family", TELL)
def test_an_engines_experts_give_the_numbers_of_a_plain_model_that_is_told_the_same(
    folders: dict[str, Path], family: str
) -> None:
    case = CASES[family]
    train_data = routed_train_data(case)
    expected_log_probs, expected = told_reference(case, folders[family], train_data)
    with trainer_of(folders[family], family, "--use-rollout-routing-replay", *FULL) as (args, model):
        data = trainer.prepare(args, train_data)
        replay = replay_of(args, model)
        replay.begin(data)
        mine = dict(zip(data["partition"], old_log_probs(args, model, data, replay), strict=True))
        replayed_backward(args, model, data, replay)
        actual = trainer.model_gradients(args, model)
        assert replay.take_metrics()["routing_replay_changed"] > 0.5
    errors = [float((mine[index] - log_prob).abs().max()) for index, log_prob in enumerate(expected_log_probs)]
    assert max(errors) < LOG_PROB_BOUND
    worst = gradient_errors(actual, expected)
    assert max(worst.values()) < GRADIENT_BOUND, sorted(worst.items(), key=lambda item: -item[1])[:5]


# Several steps, and differences that would go unnoticed without recorded ids


def choices_of(case: FamilyCase, folder: Path, tokens: Tensor) -> Tensor:
    """[L - 1, layers, k]: the plain model's choices."""
    model = case.load_reference(folder)
    seen: dict[int, Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "gate"):
            block.mlp.gate.register_forward_hook(lambda _, __, output, layer=layer: seen.update({layer: output[2]}))
    reference_logits(model, tokens)
    dense = torch.zeros(len(tokens), case.config["num_experts_per_tok"], dtype=torch.long)
    return torch.stack([seen.get(layer, dense) for layer in range(case.config["num_hidden_layers"])], 1)[:-1]


def second_step(
    args: Namespace, model: Sequence[torch.nn.Module], data: dict[str, Any], replay: RoutingReplay
) -> dict[str, Tensor]:
    """Gradients of the second of two steps; the routers were changed before it."""
    iterators = iterators_of(replay, data, 1)
    with replay.during("train"):
        for step, count in enumerate(data["num_microbatches"]):
            for chunk in model:
                chunk.zero_grad_buffer()
                chunk.train()
            batch_size = data["global_batch_sizes"][step]
            accumulate_gradients(args, "", iterators, model, count, batch_size, loss_type="sft_loss")
            if step == 0:
                turn_routers_round(model)
    return trainer.model_gradients(args, model)


def test_the_second_step_of_a_rollout_uses_the_experts_recorded_before_the_first(folders: dict[str, Path]) -> None:
    case, folder = CASES["qwen3_moe"], folders["qwen3_moe"]
    train_data = make_train_data(case.vocab_size)
    with trainer_of(folder, "qwen3_moe", "--use-routing-replay", "--global-batch-size", 4, *FULL) as (args, model):
        data = trainer.prepare(args, train_data)
        replay = replay_of(args, model)
        replay.begin(data)
        old_log_probs(args, model, data, replay)
        actual = second_step(args, model, data, replay)
        assert replay.take_metrics()["routing_replay_changed"] > 0.1
        first, second = data["num_microbatches"]
        of = [data["partition"][index] for batch in data["micro_batch_indices"][first:] for index in batch]
    assert second > 0 and 0 < len(of) < len(train_data["tokens"])
    routed = {**train_data, "rollout_routed_experts": [
        choices_of(case, folder, torch.tensor(tokens)) for tokens in train_data["tokens"]
    ]}  # fmt: skip
    _, expected = told_reference(case, folder, routed, of=of, turned=True)
    rollouts = len(set(train_data["rollout_ids"])) / len({train_data["rollout_ids"][index] for index in of})
    worst = gradient_errors(actual, {name: rollouts * gradient for name, gradient in expected.items()})
    assert max(worst.values()) < GRADIENT_BOUND, sorted(worst.items(), key=lambda item: -item[1])[:5]


# Passes without replay, and refusals


def test_other_passes_choose_freely_and_mtp_layers_always_do(folders: dict[str, Path]) -> None:
    with trainer_of(folders["glm4_moe"], "glm4_moe", "--use-rollout-routing-replay") as (args, model):
        data = trainer.prepare(args, routed_train_data(CASES["glm4_moe"]))
        free = trainer.response_log_probs(args, model, data)
        replay = replay_of(args, model)
        replay.begin(data)
        iterators = iterators_of(replay, data, 1)
        reference = forward_only(get_log_probs_and_entropy, args, model, iterators, data["num_microbatches"])
        assert all(map(torch.equal, reference["log_probs"], free))
        assert not all(map(torch.equal, old_log_probs(args, model, data, replay), free))
        routers = {name: m for name, m in model[0].named_modules() if isinstance(m, Router)}
        assert {name: router.replayed_layer for name, router in routers.items() if ".mtp." in name}.keys()
        assert all((router.replayed_layer is None) == (".mtp." in name) for name, router in routers.items())


def test_training_before_anything_was_recorded_is_an_error(folders: dict[str, Path]) -> None:
    with trainer_of(folders["qwen3_moe"], "qwen3_moe", "--use-routing-replay") as (args, model):
        data = trainer.prepare(args, make_train_data(CASES["qwen3_moe"].vocab_size))
        replay = replay_of(args, model)
        replay.begin(data)
        with pytest.raises(SlimeError, match="layer 1 has no recorded choice of experts for this micro-batch"):
            replayed_backward(args, model, data, replay)


def test_data_without_the_engines_experts_are_refused_before_training(folders: dict[str, Path]) -> None:
    with trainer_of(folders["qwen3_moe"], "qwen3_moe", "--use-rollout-routing-replay") as (args, model):
        train_data = routed_train_data(CASES["qwen3_moe"])
        replay = replay_of(args, model)
        train_data["rollout_routed_experts"][3][2, 0, 1] = -1
        with pytest.raises(DataError, match="of sample 3 has expert -1 at position 2 .*--use-rollout-routing-replay"):
            replay.begin(trainer.prepare(args, train_data))
        del train_data["rollout_routed_experts"]
        with pytest.raises(DataError, match="the train data have no rollout_routed_experts"):
            replay.begin(trainer.prepare(args, train_data))
