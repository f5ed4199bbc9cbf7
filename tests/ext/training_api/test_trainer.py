"""The trainer of many adapters against transformers and PEFT, and against itself with other clients present."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split

from slime.backends.megatron_utils import initialize
from slime.ext.training_api.adapter_trainer import OPTIMIZER_FILE, AdapterTrainer
from slime.ext.training_api.backend import AdamParams, Datum, LoraSpec, PassRequest, RequestRefused
from slime.ext.training_api.losses import LOSSES
from slime.utils.errors import DataError
from tests.ext.training_api import reference_backend as reference
from tests.matrix import trainer
from tests.matrix.case import load_cases
from tests.matrix.parity import one_process_world

RANK, VOCAB = 4, 131
ADAM = AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Namespace, Any, Path]]:
    """Args, model and folder of a tiny base model."""
    folder = tmp_path_factory.mktemp("hf")
    case = load_cases(["qwen3"])["qwen3"]
    case.write_checkpoint(folder)
    with one_process_world():
        args = trainer.make_args(case, folder, "--lora-rank", RANK, "--calculate-per-token-loss")
        initialize.init(args)
        yield args, trainer.load_model(args), folder


@pytest.fixture
def ours(world: tuple[Namespace, Any, Path]) -> AdapterTrainer:
    return AdapterTrainer(*world[:2])


def make_data(loss: str, seed: int = 0, lengths: tuple[int, ...] = (5, 1, 17, 30, 9), k: int = 0) -> list[Datum]:
    """Data with every input that a loss may have; the sampler's log-probs are far enough away to be clipped."""
    draw = np.random.default_rng(seed)
    data = []
    for length in lengths:
        shape = (length, k) if k else (length,)
        inputs: dict[str, np.ndarray] = {"target_tokens": draw.integers(0, VOCAB, shape)}
        for name in (*LOSSES[loss].needs, *LOSSES[loss].takes):
            inputs[name] = draw.normal(size=shape).astype(np.float32)
        if "logprobs" in inputs:
            inputs["logprobs"] -= 5
        for name, value in (("clip_low_threshold", 0.7), ("clip_high_threshold", 1.4)):
            if name in inputs:
                inputs[name] = np.full(shape, value, np.float32)
        if "sequence_ratio_mask" in inputs:
            inputs["sequence_ratio_mask"] = (inputs["sequence_ratio_mask"] > -0.5).astype(np.float32)
        data.append(Datum(draw.integers(0, VOCAB, length).tolist(), inputs))
    return data


def request(model_id: str, loss: str = "cross_entropy", *, backward: bool = True, **options: Any) -> PassRequest:
    return PassRequest(model_id, make_data(loss, **options), loss, backward=backward)


def trained(ours: AdapterTrainer, model_id: str, spec: LoraSpec, steps: int = 2) -> None:
    """An adapter whose B is not zero."""
    ours.add(model_id, spec)
    for seed in range(steps):
        ours.run([request(model_id, seed=100 + seed)])
        ours.step(model_id, ADAM)


def peft_model(ours: AdapterTrainer, model_id: str, folder: Path, base: Path) -> PeftModel:
    ours.save(model_id, folder, with_optimizer=False)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    return PeftModel.from_pretrained(model, str(folder), is_trainable=True).eval()


def peft_log_probs(model: PeftModel, datum: Datum) -> Tensor:
    targets = torch.tensor(datum.inputs["target_tokens"])
    table = model(torch.tensor([datum.tokens])).logits[0].log_softmax(-1)
    return table.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)


def gradients(ours: AdapterTrainer, model_id: str) -> dict[str, Tensor]:
    state = ours._states[model_id]
    assert state.has_gradient
    return ours._adapters.as_peft(ours.model, ours._by_key(state.gradient), rank=state.spec.rank)


@pytest.mark.parametrize(
    ("loss", "k", "packs"),
    [
        *((name, 0, False) for name in LOSSES),
        ("cross_entropy", 3, False),
        ("ppo", 0, True),
        ("cross_entropy", 3, True),
    ],
)
def test_log_probs_losses_and_gradients_are_those_of_transformers_and_peft(
    world: Any, tmp_path: Path, loss: str, k: int, packs: bool
) -> None:
    ours = AdapterTrainer(*world[:2], packs_clients=packs)
    trained(ours, "m", LoraSpec(RANK, seed=3))
    model = peft_model(ours, "m", tmp_path / "m", world[2])
    asked = request("m", loss, k=k)
    (outputs,) = ours.run([asked])
    total = torch.zeros(())
    for index, datum in enumerate(asked.data):
        log_prob = peft_log_probs(model, datum)
        np.testing.assert_allclose(outputs[index]["logprobs"], log_prob.detach().numpy(), atol=1e-5)
        inputs = {name: torch.tensor(value) for name, value in datum.inputs.items()}
        value = reference.LOSSES[loss](log_prob, inputs, {})
        assert float(outputs[index]["elementwise_loss"].sum()) == pytest.approx(value.item(), rel=1e-4, abs=1e-4)
        total = total + value
    total.backward()
    wanted = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}
    found = gradients(ours, "m")
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        error = (gradient - wanted[name]).norm() / wanted[name].norm()
        assert error < 1e-4, (name, float(error))


def test_a_forward_pass_gives_the_same_log_probs_and_no_gradient(ours: AdapterTrainer) -> None:
    trained(ours, "m", LoraSpec(RANK, seed=3))
    (without,) = ours.run([request("m", "ppo", backward=False)])
    assert not ours._states["m"].has_gradient
    (with_gradient,) = ours.run([request("m", "ppo")])
    for index in without:
        np.testing.assert_array_equal(without[index]["logprobs"], with_gradient[index]["logprobs"])


def life(ours: AdapterTrainer, model_id: str, seed: int) -> list[Any]:
    """The steps of a client as single calls, each returning numbers."""
    lengths = tuple(random.Random(seed).choices(range(1, 40), k=6))
    spec = LoraSpec(2 + seed % 3, seed=seed, train_attn=seed != 1)
    calls: list[Any] = [lambda: ours.add(model_id, spec)]
    for step in range(3):
        for loss in ("cross_entropy", "importance_sampling"):
            calls.append(lambda step=step, loss=loss: ours.run([request(model_id, loss, seed=step, lengths=lengths)]))
        calls.append(lambda: ours.step(model_id, ADAM))
    return calls


def flat(result: Any) -> list[Any]:
    if isinstance(result, list):
        (result,) = result
    if isinstance(result, dict) and 0 in result:
        return [array.tolist() for index in sorted(result) for array in result[index].values()]
    return [result]


def test_no_bit_of_a_clients_numbers_depends_on_other_clients(ours: AdapterTrainer) -> None:
    alone = [flat(call()) for call in life(ours, "first", 0)]
    values = ours._states["first"].values.clone()
    clients = [life(ours, f"client {seed}", seed) for seed in (0, 1, 2)]
    draw, met = random.Random(7), []
    while any(clients):
        client = draw.choice([client for client in clients if client])
        result = flat(client.pop(0)())
        if client is clients[0]:
            met.append(result)
    assert met == alone
    assert torch.equal(ours._states["client 0"].values, values)
    ours.remove("client 1")
    assert not torch.equal(ours._states["client 2"].values, values)


def state_of(ours: AdapterTrainer, model_id: str) -> list[Tensor]:
    state = ours._states[model_id]
    return [state.values, *state.moments.values()]


def test_packs_of_several_clients_change_no_bit_of_each(world: tuple[Namespace, Any, Path]) -> None:
    """Requests of three clients in one call against each client's in separate calls, with packed micro-batches."""
    packed = AdapterTrainer(*world[:2], packs_clients=True)
    together: list[list[Any]] = [[], [], []]
    names, rows = ["x", "y", "z"], []
    hook = world[1][0].register_forward_pre_hook(
        lambda _, __, inputs: rows.append(inputs["input_ids"].size(1)), with_kwargs=True
    )
    specs = [LoraSpec(2 + seed, seed=seed, train_attn=seed != 1) for seed in range(3)]

    def asked(seed: int, step: int) -> list[PassRequest]:
        small, large = ((3, 7), (9,), (2, 5, 1))[seed], (20 + seed, 11, 31)
        kinds = (("cross_entropy", 0, small), ("ppo", 0, large), ("cross_entropy", 2, small), ("cispo", 0, small))
        return [request(names[seed], loss, k=k, seed=step, lengths=lengths) for loss, k, lengths in kinds]

    for seed, name in enumerate(names):
        packed.add(name, specs[seed])
    for step in range(2):
        requests = [one for group in zip(*(asked(seed, step) for seed in (2, 0, 1)), strict=True) for one in group]
        for one, outputs in zip(requests, packed.run(requests), strict=True):
            together[names.index(one.model_id)].append(flat(outputs))
        for name in names:
            packed.step(name, ADAM)
    hook.remove()
    assert len(rows) < 2 * 3 * 5  # packed: two steps of three clients
    assert set(rows) == {world[0].max_tokens_per_gpu}
    after = [state_of(packed, name) for name in names]
    for seed, name in enumerate(names):
        packed.add(name, specs[seed])
        alone = []
        for step in range(2):
            alone += [flat(packed.run([one])) for one in asked(seed, step)]
            packed.step(name, ADAM)
        assert alone == together[seed]
        assert all(map(torch.equal, state_of(packed, name), after[seed]))


def test_a_saved_state_continues_to_the_bit(ours: AdapterTrainer, tmp_path: Path) -> None:
    trained(ours, "m", LoraSpec(RANK, seed=3))
    ours.save("m", tmp_path / "saved", with_optimizer=True)
    ours.run([request("m", seed=5)])
    ours.step("m", ADAM)
    ours.add("other", LoraSpec(RANK, seed=9))
    ours.run([request("other", seed=6)])  # dropped by the load
    ours.load("other", tmp_path / "saved", with_optimizer=True)
    ours.run([request("other", seed=5)])
    ours.step("other", ADAM)
    first, second = ours._states["m"], ours._states["other"]
    assert first.num_steps == second.num_steps == 3
    assert torch.equal(first.values, second.values)
    assert all(torch.equal(first.moments[name], second.moments[name]) for name in first.moments)
    ours.load("other", tmp_path / "saved", with_optimizer=False)
    assert second.num_steps == 0
    assert not any(moment.any() for moment in second.moments.values())


def test_a_state_of_another_rank_or_without_an_optimizer_is_refused_and_changes_nothing(
    ours: AdapterTrainer, tmp_path: Path
) -> None:
    trained(ours, "m", LoraSpec(RANK, seed=3))
    ours.save("m", tmp_path / "saved", with_optimizer=False)
    assert not (tmp_path / "saved" / OPTIMIZER_FILE).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    before = ours._states["m"].values.clone()
    with pytest.raises(RequestRefused, match="no state of the optimizer"):
        ours.load("m", tmp_path / "saved", with_optimizer=True)
    with pytest.raises(RequestRefused, match="exists"):
        ours.save("m", tmp_path / "saved", with_optimizer=False)
    ours.add("small", LoraSpec(RANK - 1, seed=3))
    with pytest.raises(DataError, match="r and lora_alpha are 4"):
        ours.load("small", tmp_path / "saved", with_optimizer=False)
    assert torch.equal(ours._states["m"].values, before)


def test_an_adapter_of_a_smaller_rank_trains_as_one(ours: AdapterTrainer, world: Any, tmp_path: Path) -> None:
    trained(ours, "m", LoraSpec(2, seed=3, train_mlp=False))
    model = peft_model(ours, "m", tmp_path / "m", world[2])
    assert model.peft_config["default"].r == 2
    assert model.peft_config["default"].lora_alpha == 4
    asked = request("m", backward=False)
    (outputs,) = ours.run([asked])
    for index, datum in enumerate(asked.data):
        np.testing.assert_allclose(
            outputs[index]["logprobs"], peft_log_probs(model, datum).detach().numpy(), atol=1e-5
        )
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            assert bool(parameter.any()) is ("self_attn" in name), name


def test_a_step_is_that_of_adamw_with_a_clipped_gradient(ours: AdapterTrainer) -> None:
    ours.add("m", LoraSpec(RANK, seed=3))
    state = ours._states["m"]
    parameter = torch.nn.Parameter(state.values.clone())
    adam = AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
    theirs = torch.optim.AdamW([parameter], lr=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for seed in range(3):
        ours.run([request("m", seed=seed)])
        parameter.grad = state.gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_([parameter], 0.5)
        theirs.step()
        assert ours.step("m", adam)["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        torch.testing.assert_close(state.values, parameter.detach(), rtol=1e-6, atol=1e-8)


def test_a_gradient_that_is_not_finite_is_dropped_and_the_client_continues(ours: AdapterTrainer) -> None:
    trained(ours, "m", LoraSpec(RANK, seed=3))
    before = ours._states["m"].values.clone()
    ours.run([request("m")])
    ours._states["m"].gradient[0] = torch.inf
    with pytest.raises(RequestRefused, match="norm of the gradient is inf"):
        ours.step("m", ADAM)
    assert torch.equal(ours._states["m"].values, before)
    ours.run([request("m")])
    ours.step("m", ADAM)
    assert not torch.equal(ours._states["m"].values, before)
