"""The client of the package index, unmodified, with the service: loops that learn, states, samples, and errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from slime.ext.training_api.backend import Datum, LoraSpec, PassRequest, PassResult
from tests.ext.training_api.reference_backend import ReferenceBackend
from tests.ext.training_api.serving import KEY, Served, serve

TEXT = list(b"counting: one two three")
GREEDY = types.SamplingParams(max_tokens=4, temperature=0)
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("states")
    with serve(ReferenceBackend(tiny_model), tiny_model, folder) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[tinker.ServiceClient]:
    with served.client() as client:
        yield client


def trained(client: tinker.ServiceClient, served: Served, seed: int = 0, rank: int = 8) -> tinker.TrainingClient:
    return client.create_lora_training_client(served.service.settings.model_name, rank=rank, seed=seed).result()


def prompt(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def text_datum(tokens: list[int]) -> types.Datum:
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=prompt(tokens[:-1]), loss_fn_inputs=inputs)


def steps(model: tinker.TrainingClient, data: list[types.Datum], number: int) -> list[float]:
    """The losses of some steps; both requests of each are sent before an answer is read."""
    losses = []
    for _ in range(number):
        passed, stepped = model.forward_backward(data, "cross_entropy"), model.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        assert (stepped.result().metrics or {})["grad_norm"] > 0
    return losses


def copied(model: tinker.TrainingClient, tokens: list[int]) -> float:
    """The share of right tokens when the model continues a text, each after the right ones."""
    sampler = model.save_weights_and_get_sampling_client().result()
    found = sampler.sample(prompt(tokens[:1]), 1, types.SamplingParams(max_tokens=len(tokens) - 1, temperature=0))
    drawn = found.result().sequences[0].tokens
    return sum(a == b for a, b in zip(drawn, tokens[1:], strict=False)) / (len(tokens) - 1)


def test_a_supervised_loop_learns_a_text(served, client):
    model = trained(client, served)
    assert model.get_tokenizer().vocab_size >= 500 and model.get_info().lora_rank == 8
    before = copied(model, TEXT)
    losses = steps(model, [text_datum(TEXT)], 12)
    assert before <= 0.1 and copied(model, TEXT) == 1.0 and losses[-1] < losses[0] / 20


def test_a_loop_of_rewards_learns_to_say_an_even_token(served, client):
    model = trained(client, served)

    def rollout(seed: int) -> tuple[float, list[types.Datum]]:
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=1, seed=seed)
        sequences = sampler.sample(prompt(TEXT[:4]), 16, params).result().sequences
        rewards = [float(one.tokens[0] % 2 == 0) for one in sequences]
        mean = sum(rewards) / len(rewards)
        data = [
            types.Datum(
                model_input=prompt(TEXT[:4]),
                loss_fn_inputs={
                    "target_tokens": np.array([0, 0, 0, one.tokens[0]]),
                    "logprobs": np.array([0, 0, 0, one.logprobs[0]], np.float32),
                    "advantages": np.array([0, 0, 0, reward - mean], np.float32),
                },
            )
            for one, reward in zip(sequences, rewards, strict=True)
        ]
        return mean, data

    before, _ = rollout(seed=0)
    for seed in range(1, 11):
        _, data = rollout(seed)
        model.forward_backward(data, "ppo")
        model.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    assert before < 0.75 and rollout(seed=11)[0] > 0.9


def test_log_probs_are_those_of_the_backend_to_the_bit_soft_targets_and_sparse_ones_too(served, client, tiny_model):
    model = trained(client, served, seed=3)
    soft = {
        "target_tokens": np.array([[5, 6, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 9]]),
        "weights": np.array([[0.5, 0.5, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 2]], np.float32),
    }
    sparse = {name: types.TensorData.from_torch_sparse(torch.tensor(value)) for name, value in soft.items()}
    mixed = [
        text_datum(TEXT),
        types.Datum(model_input=prompt([4, 5, 6]), loss_fn_inputs=soft),
        text_datum(TEXT[:9]),
        types.Datum(model_input=prompt([4, 5, 6]), loss_fn_inputs=sparse),
    ]
    assert sparse["weights"].sparse_crow_indices is not None
    found = [one["logprobs"].to_numpy() for one in model.forward(mixed, "cross_entropy").result().loss_fn_outputs]
    backend = ReferenceBackend(tiny_model)
    asyncio.run(backend.add_model("m", LoraSpec(8, 3)))
    data = [Datum(TEXT[:-1], {"target_tokens": np.array(TEXT[1:])}), Datum([4, 5, 6], soft)]
    (alone,) = asyncio.run(backend.passes([PassRequest("m", data, "cross_entropy", backward=False)]))
    assert isinstance(alone, PassResult)
    for mine, theirs in ((found[0], 0), (found[1], 1), (found[3], 1)):
        np.testing.assert_array_equal(mine, alone.outputs[theirs]["logprobs"])
    assert found[2].shape == (8,)


def test_a_custom_loss_has_the_gradient_of_the_built_in_one(served, client):
    def loss(data: list[types.Datum], log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum(one.sum() for one in log_probs), {"mine:sum": 1.0}

    custom, built_in = (trained(client, served, seed=5) for _ in range(2))
    answer = custom.forward_backward_custom([text_datum(TEXT)], loss).result()
    usual = built_in.forward_backward([text_datum(TEXT)], "cross_entropy").result()
    assert answer.metrics["loss:sum"] == pytest.approx(usual.metrics["loss:sum"]) and answer.metrics["mine:sum"] == 1
    norms = [(one.optim_step(ADAM).result().metrics or {})["grad_norm"] for one in (custom, built_in)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_two_clients_at_once_change_no_bit_of_each_other(served, client):
    alone = [steps(trained(client, served, seed), [text_datum(TEXT[seed:])], 3) for seed in (1, 2)]
    with served.client() as other:
        models = [trained(one, served, seed) for one, seed in ((client, 1), (other, 2))]
        together: list[list[float]] = [[], []]
        for _ in range(3):
            sent = [one.forward_backward([text_datum(TEXT[i + 1 :])], "cross_entropy") for i, one in enumerate(models)]
            stepped = [one.optim_step(ADAM) for one in models]
            for i in range(2):
                together[i].append(sent[i].result().metrics["loss:sum"])
                stepped[i].result()
    assert together == alone


def test_a_saved_state_continues_where_it_was_with_or_without_its_optimizer(served, client):
    model, data = trained(client, served, seed=4), [text_datum(TEXT)]
    steps(model, data, 2)
    path = model.save_state("middle", user_metadata={"note": "two steps"}).result().path
    after = steps(model, data, 3)
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    assert steps(resumed, data, 3) == after and resumed.get_info().lora_rank == 8
    fresh = client.create_training_client_from_state(path).result()
    first, *later = steps(fresh, data, 3)
    assert first == after[0] and later != after[1:]
    with pytest.raises(tinker.RequestFailedError, match="overwrite=True"):
        model.save_state("middle").result()
    assert model.save_state("middle", overwrite=True).result().path == path
    overwritten = client.create_training_client_from_state(path).result()
    assert steps(overwritten, data, 1)[0] < after[-1]


def test_listing_lifetime_and_deletion(served, client):
    model = trained(client, served)
    steps(model, [text_datum(TEXT)], 1)
    kept = model.save_state("a", ttl_seconds=3600, user_metadata={"k": "v"}).result().path
    sampled = model.save_weights_for_sampler("b").result().path
    rest = served.rest()
    run = rest.get_training_run(model.model_id).result()
    assert run.lora_rank == 8 and run.last_checkpoint is not None and run.last_checkpoint.tinker_path == kept
    listed = rest.list_checkpoints(model.model_id).result().checkpoints
    assert {(one.tinker_path, one.checkpoint_type) for one in listed} == {(kept, "training"), (sampled, "sampler")}
    assert run.last_checkpoint.user_metadata == {"k": "v"} and run.last_checkpoint.expires_at is not None
    info = rest.get_weights_info_by_tinker_path(kept).result()
    assert (info.lora_rank, info.train_unembed) == (8, False)
    runs = rest.list_training_runs(limit=1).result()
    assert runs.cursor.total_count >= len(runs.training_runs) == 1
    rest.delete_checkpoint_from_tinker_path(sampled).result()
    rest.set_checkpoint_ttl_from_tinker_path(kept, 1).result()
    time.sleep(1.1)
    assert rest.list_checkpoints(model.model_id).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError, match="has expired"):
        client.create_sampling_client(model_path=kept).result()
    assert [one.model_name for one in rest.get_server_capabilities().result().supported_models] == [
        served.service.settings.model_name
    ]


def test_samples_of_base_snapshot_and_saved_adapter(served, client):
    base = client.create_sampling_client(base_model=served.service.settings.model_name).result()
    model = trained(client, served)
    snapshot = model.save_weights_and_get_sampling_client().result()
    first = [one.sample(prompt(TEXT[:5]), 1, GREEDY).result().sequences[0] for one in (base, snapshot)]
    assert first[0].tokens == first[1].tokens and first[0].logprobs == pytest.approx(first[1].logprobs)
    steps(model, [text_datum(TEXT)], 3)
    saved = client.create_sampling_client(model_path=model.save_weights_for_sampler("after").result().path).result()
    assert snapshot.sample(prompt(TEXT[:5]), 1, GREEDY).result().sequences[0].logprobs == first[1].logprobs
    trained_now = model.forward([text_datum(TEXT)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert saved.compute_logprobs(prompt(TEXT)).result()[1:] == pytest.approx(trained_now, abs=1e-5)
    assert saved.compute_logprobs(prompt(TEXT), prompt_logprobs_last_n=2).result()[:-2] == [None] * (len(TEXT) - 2)
    answer = saved.sample(prompt(TEXT[:5]), 3, types.SamplingParams(max_tokens=6, seed=1), topk_prompt_logprobs=2)
    sequences, top = answer.result().sequences, answer.result().topk_prompt_logprobs
    assert len({one.sequence_id for one in sequences}) == 3 and len({tuple(one.tokens) for one in sequences}) > 1
    assert top is not None and top[0] is None and all(len(row or ()) == 2 for row in top[1:])
    stop = types.SamplingParams(max_tokens=6, temperature=0, stop=[first[0].tokens[1]])
    stopped = base.sample(prompt(TEXT[:5]), 1, stop).result().sequences[0]
    assert (stopped.tokens, stopped.stop_reason) == (first[0].tokens[:2], "stop")
    assert saved.get_base_model() == served.service.settings.model_name


def test_a_batch_with_a_wrong_part_takes_no_step_and_the_next_is_whole(served, client):
    model, other = trained(client, served, seed=6), trained(client, served, seed=6)
    wrong = types.Datum(model_input=prompt([9999]), loss_fn_inputs={"target_tokens": [1]})
    model.forward_backward([text_datum(TEXT)], "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match=r"data\[0\].model_input"):
        model.forward_backward([wrong], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="No step was taken"):
        model.optim_step(ADAM).result()
    with pytest.raises(tinker.BadRequestError, match="stable_reinforce.*not served"):
        model.forward([text_datum(TEXT)], "stable_reinforce").result()
    assert steps(model, [text_datum(TEXT)], 2) == steps(other, [text_datum(TEXT)], 2)


def test_quotas_and_unknown_names_say_what_is_allowed(served, client, tiny_model, tmp_path):
    name = served.service.settings.model_name
    for call, error, message in (
        (lambda: client.create_lora_training_client("Qwen/Qwen3-8B").result(), tinker.BadRequestError, "alone"),
        (lambda: client.create_lora_training_client(name, rank=64).result(), tinker.BadRequestError, "1 to 32"),
        (lambda: client.create_training_client_from_state("tinker://a/weights/b").result(), tinker.NotFoundError, "a"),
        (lambda: client.create_sampling_client(model_path="tinker://a").result(), tinker.BadRequestError, "RUN"),
        (lambda: trained(client, served).save_state("../up").result(), tinker.BadRequestError, "path is"),
    ):
        with pytest.raises(error, match=message):
            call()
    limits = {"max_models": 1, "max_sessions": 1, "max_samplers": 1}
    with serve(ReferenceBackend(tiny_model), tiny_model, tmp_path, **limits) as small, small.client() as first:
        model = trained(first, small)
        with pytest.raises(tinker.PermissionDeniedError, match="--training-api-max-sessions"):
            tinker.ServiceClient(base_url=small.url, api_key=KEY).create_lora_training_client(name).result()
        with pytest.raises(tinker.PermissionDeniedError, match="--training-api-max-models"):
            trained(first, small)
        old, new = (model.save_weights_and_get_sampling_client().result() for _ in range(2))
        new.sample(prompt([4]), 1, GREEDY).result()
        with pytest.raises(tinker.RequestFailedError, match="--training-api-max-samplers"):
            old.sample(prompt([4]), 1, GREEDY).result()
