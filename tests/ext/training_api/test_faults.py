"""Clients, trainers and servers that disappear: a request has a result or an error, and nothing is half done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import tinker
from tinker import types

from slime.ext.training_api import queues, routes
from slime.ext.training_api.backend import BackendDied, BackendError, PassRequest, PassResult
from slime.ext.training_api.checkpoints import TRAINING
from tests.eventually import wait_until
from tests.ext.training_api.reference_backend import ReferenceBackend
from tests.ext.training_api.serving import KEY, serve
from tests.ext.training_api.test_client import ADAM, TEXT, steps, text_datum, trained


class Failing(ReferenceBackend):
    """Fails the passes whose first token says so."""

    async def passes(self, requests: Sequence[PassRequest]) -> list[PassResult | Exception]:
        tokens = {request.data[0].tokens[0] for request in requests}
        if 400 in tokens:
            raise BackendDied("rank 0 has ended")
        if 401 in tokens:
            await asyncio.sleep(60)
        good = [request for request in requests if request.data[0].tokens[0] != 402]
        results = iter(await super().passes(good))
        return [next(results) if one in good else BackendError("out of memory") for one in requests]


def datum(token: int) -> types.Datum:
    return text_datum([token, *TEXT])


def test_an_error_fails_exactly_the_requests_concerned(tiny_model: Path, tmp_path: Path) -> None:
    with serve(Failing(tiny_model, pause_s=0.05), tiny_model, tmp_path) as served, served.client() as client:
        model, other, quiet = (trained(client, served, 1) for _ in range(3))
        sent = [one.forward_backward([datum(token)], "cross_entropy") for one, token in ((model, 402), (other, 5))]
        step = model.optim_step(ADAM)
        assert steps(quiet, [datum(5)], 1)[0] == sent[1].result().metrics["loss:sum"]
        with pytest.raises(tinker.RequestFailedError, match="out of memory"):
            sent[0].result()
        with pytest.raises(tinker.RequestFailedError, match="No step was taken.*out of memory"):
            step.result()
        assert steps(model, [datum(5)], 2)[0] == sent[1].result().metrics["loss:sum"]


def test_a_pass_without_end_costs_its_model_alone(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"request_timeout_s": 2.0}
    with serve(Failing(tiny_model), tiny_model, tmp_path, **settings) as served, served.client() as client:
        model, other = (trained(client, served, 1) for _ in range(2))
        late = model.forward_backward([datum(401)], "cross_entropy")
        with pytest.raises(tinker.RequestFailedError, match="--training-api-request-timeout-s"):
            late.result()
        with pytest.raises(tinker.RequestFailedError, match="state of the model is not known"):
            model.optim_step(ADAM).result()
        assert steps(other, [datum(5)], 1)


def test_the_death_of_the_trainer_answers_everything(tiny_model: Path, tmp_path: Path) -> None:
    with serve(Failing(tiny_model, pause_s=0.05), tiny_model, tmp_path) as served, served.client() as client:
        model, other = (trained(client, served, 1) for _ in range(2))
        sent = [one.forward_backward([datum(token)], "cross_entropy") for one, token in ((model, 400), (other, 5))]
        steps_sent = [one.optim_step(ADAM) for one in (model, other)]
        failed = 0
        for one in (*sent, *steps_sent):
            try:
                one.result()
            except (tinker.RequestFailedError, tinker.APIStatusError) as error:
                assert "rank 0 has ended" in str(error)
                failed += 1
        assert failed >= 2 and served.service.dead is not None
        with pytest.raises(tinker.APIStatusError, match="will the server"):
            model.forward([datum(5)], "cross_entropy").result()


def test_a_client_that_vanishes_leaves_only_what_it_saved(tiny_model: Path, tmp_path: Path) -> None:
    backend = ReferenceBackend(tiny_model)
    with serve(backend, tiny_model, tmp_path, session_timeout_s=1.0) as served:
        client = tinker.ServiceClient(base_url=served.url, api_key=KEY)
        model, empty = (trained(client, served) for _ in range(2))
        steps(model, [text_datum(TEXT)], 1)
        path = model.save_state("kept").result().path
        model.save_weights_and_get_sampling_client().result()
        client.holder.close()  # no more heartbeats, and no goodbye
        wait_until(lambda: not backend.models and not backend.samplers)
        assert served.rest().list_sessions().result().sessions == []
        assert [one.tinker_path for one in served.rest().list_user_checkpoints().result().checkpoints] == [path]
        runs = served.rest().list_training_runs().result().training_runs
        assert [one.training_run_id for one in runs] == [model.model_id] != [empty.model_id]


def test_a_server_that_starts_again_has_every_saved_state_and_says_what_is_gone(
    tiny_model: Path, tmp_path: Path
) -> None:
    with serve(ReferenceBackend(tiny_model), tiny_model, tmp_path) as served:
        client = tinker.ServiceClient(base_url=served.url, api_key=KEY)
        model = trained(client, served)
        steps(model, [text_datum(TEXT)], 2)
        path, sampler = model.save_state("kept").result().path, model.save_weights_for_sampler("s").result().path
        after = steps(model, [text_datum(TEXT)], 2)
        torn = served.service.checkpoints.next_place(model.model_id, TRAINING, "torn", overwrite=False)
        served.service.checkpoints.announce(torn)  # like a server that is killed while it saves
    with serve(ReferenceBackend(tiny_model), tiny_model, tmp_path) as served, served.client() as client:
        listed = served.rest().list_user_checkpoints().result().checkpoints
        assert {one.tinker_path for one in listed} == {path, sampler}
        resumed = client.create_training_client_from_state_with_optimizer(path).result()
        assert steps(resumed, [text_datum(TEXT)], 2) == after
        from_disk = client.create_sampling_client(model_path=sampler).result()
        assert len(from_disk.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()) == len(TEXT)


def test_a_key_sees_what_it_made_and_nobody_comes_without(tiny_model: Path, tmp_path: Path) -> None:
    keys = (KEY, "tml-the-key-of-another-one")
    with serve(ReferenceBackend(tiny_model), tiny_model, tmp_path, keys) as served, served.client() as client:
        model = trained(client, served)
        path = model.save_state("mine").result().path
        theirs = served.rest(keys[1])
        assert theirs.list_user_checkpoints().result().checkpoints == []
        for call in (
            lambda: theirs.get_training_run(model.model_id).result(),
            lambda: theirs.delete_checkpoint_from_tinker_path(path).result(),
        ):
            with pytest.raises(tinker.NotFoundError):
                call()
        with served.client(keys[1]) as other, pytest.raises(tinker.NotFoundError):
            other.create_training_client_from_state(path).result()
        with pytest.raises(tinker.AuthenticationError, match="no key of this server"):
            served.rest("tml-some-other-key-of-the-tests").list_sessions().result()


def test_requests_in_any_order_and_twice_are_done_once_in_theirs(tiny_model: Path, tmp_path: Path) -> None:
    """What the client does over a bad connection, with its own messages."""
    backend = ReferenceBackend(tiny_model)
    with serve(backend, tiny_model, tmp_path, request_timeout_s=1.5) as served, served.client() as client:
        model, twin = (trained(client, served, 1) for _ in range(2))
        expected = steps(twin, [text_datum(TEXT)], 3)
        holder = client.holder

        def send(seq_id: int, step: bool) -> types.UntypedAPIFuture:
            async def ask() -> types.UntypedAPIFuture:
                with holder.aclient(tinker.lib.client_connection_pool_type.ClientConnectionPoolType.TRAIN) as http:
                    if step:
                        asked = types.OptimStepRequest(optim_params=ADAM, model_id=model.model_id, seq_id=seq_id)
                        return await http.training.optim_step(request=asked)
                    given = types.ForwardBackwardInput(data=[text_datum(TEXT)], loss_fn="cross_entropy")
                    passed = types.ForwardBackwardRequest(given, model.model_id, seq_id)
                    return await http.training.forward_backward(request=passed)

            return holder.run_coroutine_threadsafe(ask()).result(20)

        futures = {seq_id: send(seq_id, step=seq_id % 2 == 0) for seq_id in (4, 3, 2, 3, 1, 5, 5)}
        promises = [served.service.promises.of(futures[seq_id].request_id, "local") for seq_id in (1, 3, 5)]
        wait_until(lambda: all(one.is_done for one in promises))
        assert all(one.error is None for one in promises) and len(futures) == 5
        assert steps_of(promises) == expected
        late = served.service.promises.of(send(9, step=True).request_id, "local")  # 6, 7 and 8 never come
        wait_until(lambda: late.is_done)
        assert "6 of the model never came" in str(late.error)


def steps_of(promises: list[queues.Promise]) -> list[float]:
    """The losses in the answers to passes."""
    from tinker.proto.response_conv import deserialize_forward_backward_output

    answers = [one.answer for one in promises]
    return [deserialize_forward_backward_output(one.body).metrics["loss:sum"] for one in answers if one is not None]


class Gated(ReferenceBackend):
    """Holds its calls until the gate is opened."""

    gate: threading.Event
    num_begun = 0

    async def passes(self, requests: Sequence[PassRequest]) -> list[PassResult | Exception]:
        self.num_begun += 1
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
        return await super().passes(requests)


def test_passes_of_many_clients_meet_in_one_call_and_clients_ask_until_it_is_done(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "POLL_S", 0.01)
    submitted, submit = [], queues.ModelQueue.submit
    monkeypatch.setattr(queues.ModelQueue, "submit", lambda *args: (submitted.append(args), submit(*args))[1])
    backend = Gated(tiny_model)
    backend.gate = threading.Event()
    with serve(backend, tiny_model, tmp_path) as served, served.client() as client:
        first, *others = [trained(client, served) for _ in range(5)]
        submitted.clear()
        asked = [first.forward([text_datum(TEXT)], "cross_entropy")]
        wait_until(lambda: backend.num_begun == 1)
        asked += [one.forward([text_datum(TEXT)], "cross_entropy") for one in others * 2]
        wait_until(lambda: len(submitted) == 9)
        backend.gate.set()
        for one in asked:
            one.result()
    assert backend.calls[0] == [first.model_id] and len(backend.calls) <= 3
    assert set(backend.calls[1]) == {one.model_id for one in others}
    assert sorted(sum(backend.calls[1:], [])) == sorted(one.model_id for one in others * 2)
