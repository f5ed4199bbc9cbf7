"""One client, one bad body or one error must not affect answers, other clients or memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from slime.ext.training_api import futures, models, service
from slime.ext.training_api.backend import (
    AdamParams,
    Backend,
    BackendDied,
    BackendError,
    LoraSpec,
    PassRequest,
    PassResult,
    SampledSequence,
    SampleResult,
    SamplingParams,
)
from slime.ext.training_api.errors import Refused
from slime.ext.training_api.futures import Answer, Promise, Promises
from slime.ext.training_api.service import TrainingService
from slime.ext.training_api.settings import ServiceSettings
from slime.ext.training_api.wire import TextLimits
from tests.eventually import until

ME = "me"
LIMIT_S = 20.0
"""Deadline for expected events, in seconds."""


class Recording(Backend):
    """Records which models and samplers exist; each call runs its entry of ``then`` before it succeeds."""

    def __init__(self, then: dict[str, Callable[[], Any]]) -> None:
        self.then = then
        self.models: set[str] = set()
        self.samplers: set[str] = set()
        self.calls: list[str] = []
        self.death: BackendDied | None = None

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        if name in self.then:
            await self.then[name]()

    async def add_model(self, model_id: str, lora: LoraSpec) -> None:
        await self._do("add_model")
        self.models.add(model_id)

    async def remove_model(self, model_id: str) -> None:
        self.models.remove(model_id)

    async def passes(self, requests: Sequence[PassRequest]) -> list[PassResult | Exception]:
        await self._do("passes")
        assert {one.model_id for one in requests} <= self.models
        return [self.answer(one) for one in requests]

    def answer(self, request: PassRequest) -> PassResult:
        return PassResult([{"logprobs": np.zeros(1, np.float32)}] * len(request.data), {"loss:sum": 0.0})

    async def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        await self._do("optim_step")
        return {}

    async def drop_gradients(self, model_id: str) -> None:
        await self._do("drop_gradients")

    async def save_state(self, model_id: str, folder: Path, with_optimizer: bool) -> None:
        await self._do("save_state")
        folder.mkdir()

    async def load_state(self, model_id: str, folder: Path, with_optimizer: bool) -> None:
        assert folder.is_dir()
        await self._do("load_state")

    async def publish_sampler(self, folder_or_model_id: Path | str, name: str) -> None:
        self.samplers.add(name)

    async def drop_sampler(self, name: str) -> None:
        await self._do("drop_sampler")
        self.samplers.remove(name)

    async def sample(
        self,
        name: str | None,
        tokens: Sequence[int],
        params: SamplingParams,
        n: int = 1,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> SampleResult:
        await self._do("sample")
        return SampleResult([SampledSequence([1], [0.0], "stop")] * n)

    async def check(self) -> None:
        if self.death is not None:
            raise self.death

    async def close(self) -> None:
        self.models.clear()


class Client:
    """The calls of one client, without HTTP."""

    def __init__(self, served: TrainingService) -> None:
        self.served = served
        asked = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0")
        self.session = served.sessions.create(asked, ME)

    def create(self, number: int = 0) -> Promise:
        lora = types.LoraConfig(rank=2)
        asked = types.CreateModelRequest(
            session_id=self.session.session_id, model_seq_id=number, base_model="base", lora_config=lora
        )
        return self.served.models.create(asked, ME)

    async def model(self, number: int = 0) -> str:
        promise = self.create(number)
        assert await promise.wait(LIMIT_S)
        assert promise.error is None
        return promise.request_id.removesuffix(":0")

    def run(self, model_id: str, seq_id: int) -> Promise:
        message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
        datum = message.data.add()
        datum.model_input.append(pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=b"\1\0\0\0")))
        datum.loss_fn_inputs["target_tokens"].CopyFrom(
            pb.Tensor(dtype=pb.DTYPE_INT64, shape=[1], dense=b"\1" + b"\0" * 7)
        )
        return self.served.requests.forward_backward(message, ME)

    def step(self, model_id: str, seq_id: int) -> Promise:
        asked = types.OptimStepRequest(model_id=model_id, seq_id=seq_id, optim_params=types.AdamParams())
        return self.served.requests.optim_step(asked, ME)

    def save(self, model_id: str, seq_id: int, *, overwrite: bool = False) -> Promise:
        asked = types.SaveWeightsRequest(model_id=model_id, seq_id=seq_id, path="a", overwrite=overwrite)
        return self.served.requests.save_weights(asked, ME)

    def load(self, model_id: str, seq_id: int, path: str) -> Promise:
        asked = types.LoadWeightsRequest(model_id=model_id, seq_id=seq_id, path=path, optimizer=False)
        return self.served.requests.load_weights(asked, ME)

    def snapshot(self, model_id: str, seq_id: int, number: int) -> Promise:
        asked = types.SaveWeightsForSamplerRequest(model_id=model_id, seq_id=seq_id, sampling_session_seq_id=number)
        return self.served.requests.save_weights_for_sampler(asked, ME)

    def sample(self, seq_id: int) -> Promise:
        base = types.CreateSamplingSessionRequest(
            session_id=self.session.session_id, sampling_session_seq_id=0, base_model="base"
        )
        asked = types.SampleRequest(
            sampling_session_id=self.served.sampling.create(base, ME),
            seq_id=seq_id,
            prompt=types.ModelInput.from_ints([1]),
            sampling_params=types.SamplingParams(),
        )
        return self.served.sampling.sample(asked, ME)[0]


@asynccontextmanager
async def serve(folder: Path, **settings: Any) -> AsyncIterator[tuple[TrainingService, Recording]]:
    chosen: dict[str, Any] = {"model_name": "base", "limits": TextLimits(512, 64), "max_rank": 8, "folder": folder}
    backend = Recording(settings.pop("then", {}))
    served = TrainingService(backend, ServiceSettings(**chosen | {"request_timeout_s": 5.0} | settings))
    await served.start()
    try:
        yield served, backend
    finally:
        await served.stop()


async def error_of(promise: Promise) -> str:
    assert await promise.wait(LIMIT_S), f"{promise.request_id} has no answer"
    return str(promise.error)


async def fail() -> None:
    raise BackendError("no room")


async def hang() -> None:
    await asyncio.sleep(LIMIT_S * 10)


async def die() -> None:
    raise BackendDied("rank 0 has ended")


@pytest.mark.asyncio
async def test_a_model_whose_run_cannot_be_written_leaves_nothing_in_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(tmp_path) as (served, backend):
        client = Client(served)

        def refuse(run: object) -> None:
            raise OSError("the disk is full")

        monkeypatch.setattr(served.checkpoints, "add_run", refuse)
        assert "disk is full" in await error_of(client.create())
        assert not backend.models
        with pytest.raises(Refused, match="model_seq_id"):
            client.create(10**300)


@pytest.mark.asyncio
async def test_a_session_that_ends_while_its_model_is_made_answers_and_frees_it(tmp_path: Path) -> None:
    begun = asyncio.Event()
    async with serve(tmp_path, then={"add_model": lambda: begun.wait()}) as (served, backend):
        client = Client(served)
        made = client.create()
        await asyncio.sleep(0)
        await served.end_session(client.session, "its client closed it.")
        begun.set()
        assert "session has ended" in await error_of(made)
        await until(lambda: not backend.models)


@pytest.mark.asyncio
async def test_a_request_that_runs_when_its_model_is_removed_is_answered_and_costs_no_other_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "CLOSE_S", 0.05)
    slow = asyncio.Event()
    async with serve(tmp_path, then={"passes": lambda: slow.wait(), "optim_step": hang}) as (served, backend):
        clients = [Client(served) for _ in range(3)]
        first, gone, other = [await one.model() for one in clients]
        running = clients[0].run(first, 1)
        await until(lambda: backend.calls.count("passes") == 1)
        waiting = clients[1].run(gone, 1)
        theirs = clients[2].run(other, 1)
        await asyncio.sleep(0.02)
        await served.end_session(clients[1].session, "its client closed it.")
        assert "session has ended" in await error_of(waiting)
        slow.set()
        assert await error_of(running) == "None"
        assert await error_of(theirs) == "None"
        stepping = clients[2].step(other, 2)
        await until(lambda: "optim_step" in backend.calls)
        await served.end_session(clients[2].session, "its client closed it.")
        assert "session has ended" in await error_of(stepping)


@pytest.mark.asyncio
async def test_a_model_unloaded_twice_is_removed_once_and_counted_once(tmp_path: Path) -> None:
    async with serve(tmp_path, max_models=1) as (served, backend):
        client = Client(served)
        model_id = await client.model()
        assert [served.models.unload(model_id, ME) for _ in range(2)] == [served.models.unload(model_id, ME)] * 2
        assert await error_of(served.models.unload(model_id, ME)) == "None"
        await client.model(1)
        with pytest.raises(Refused, match="--training-api-max-models"):
            client.create(2)
        assert len(backend.models) == 1


@pytest.mark.asyncio
async def test_gradients_that_could_not_be_dropped_are_still_not_stepped_with(tmp_path: Path) -> None:
    then: dict[str, Callable[[], Any]] = {"passes": fail, "drop_gradients": fail}
    async with serve(tmp_path, then=then) as (served, backend):
        client = Client(served)
        model_id = await client.model()
        assert "no room" in await error_of(client.run(model_id, 1))
        assert "no room" in await error_of(client.step(model_id, 2))
        then.clear()
        assert "No step was taken" in await error_of(client.step(model_id, 3))
        assert await error_of(client.step(model_id, 4)) == "None"
        assert backend.calls.count("optim_step") == 1


@pytest.mark.asyncio
async def test_a_result_that_cannot_be_written_fails_its_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(tmp_path) as (served, backend):
        client = Client(served)
        model_id = await client.model()
        with monkeypatch.context() as patch:
            patch.setattr(backend, "answer", lambda request: PassResult([], {"loss:sum": "none"}))  # type: ignore[dict-item]
            assert await error_of(client.run(model_id, 1)) != "None"
        assert "No step was taken" in await error_of(client.step(model_id, 2))
        with monkeypatch.context() as patch:

            async def none(requests: Sequence[PassRequest]) -> list[PassResult | Exception]:
                return []

            patch.setattr(backend, "passes", none)
            assert "0 results" in await error_of(client.run(model_id, 3))
        assert "No step was taken" in await error_of(client.step(model_id, 4))
        assert await error_of(client.run(model_id, 5)) == "None"


@pytest.mark.asyncio
async def test_a_load_takes_the_state_that_a_save_before_it_wrote(tmp_path: Path) -> None:
    async with serve(tmp_path) as (served, _):
        client = Client(served)
        model_id = await client.model()
        assert await error_of(client.save(model_id, 1)) == "None"
        client.save(model_id, 2, overwrite=True)
        assert await error_of(client.load(model_id, 3, f"tinker://{model_id}/weights/a")) == "None"


@pytest.mark.asyncio
async def test_a_state_of_another_base_model_is_refused(tmp_path: Path) -> None:
    async with serve(tmp_path) as (served, _):
        client = Client(served)
        model_id = await client.model()
        assert await error_of(client.save(model_id, 1)) == "None"
    async with serve(tmp_path, model_name="other") as (served, _):
        client = Client(served)
        path = f"tinker://{model_id}/weights/a"
        wanted = types.CreateSamplingSessionRequest(
            session_id=client.session.session_id, sampling_session_seq_id=0, model_path=path
        )
        with pytest.raises(Refused, match="an adapter of 'base'"):
            served.sampling.create(wanted, ME)
        with pytest.raises(Refused, match="an adapter of 'base'"):
            client.load("none", 1, path)


@pytest.mark.asyncio
async def test_a_snapshot_of_a_number_that_was_used_leaves_no_adapter_behind(tmp_path: Path) -> None:
    async with serve(tmp_path) as (served, backend):
        client = Client(served)
        model_id = await client.model()
        assert await error_of(client.snapshot(model_id, 1, 0)) == "None"
        assert "has used" in await error_of(client.snapshot(model_id, 2, 0))
        assert await error_of(client.snapshot(model_id, 3, 1)) == "None"
        backend.then["drop_sampler"] = fail_once(backend)
        await served.end_session(client.session, "its client closed it.")
        assert len(backend.samplers) == 1  # the one whose removal failed


def fail_once(backend: Recording) -> Callable[[], Any]:
    async def act() -> None:
        del backend.then["drop_sampler"]
        await fail()

    return act


@pytest.mark.asyncio
async def test_a_sample_that_is_cancelled_before_it_begins_is_answered_and_forgotten(tmp_path: Path) -> None:
    async with serve(tmp_path) as (served, _):
        client = Client(served)
        promise = client.sample(1)
        served.sampling.cancel(promise.request_id, ME)
        assert "cancelled" in await error_of(promise)
        assert not client.session.samples


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["check", "add_model"])
async def test_a_death_is_found_without_a_request_and_by_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(service, "HOUSEKEEPING_S", 0.02)
    async with serve(tmp_path, then={where: die}) as (served, backend):
        client = Client(served)
        if where == "check":
            backend.death = BackendDied("rank 0 has ended")
        else:
            assert "rank 0" in await error_of(client.create())
        await until(lambda: served.dead is not None)


@pytest.mark.asyncio
async def test_a_description_that_is_none_and_a_disk_that_refuses_do_not_end_the_housekeeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOUSEKEEPING_S", 0.02)
    async with serve(tmp_path, session_timeout_s=0.2) as (served, _):
        client = Client(served)
        model_id = await client.model()
        assert await error_of(client.save(model_id, 1)) == "None"
        (state,) = served.checkpoints.states(ME)
        for text in ("[]", '{"more": 1}', "{"):
            state.folder.with_name(state.folder.name + ".json").write_text(text)
            assert served.checkpoints.states(ME) == []

        def refuse(state: object) -> None:
            raise OSError("the disk does not answer")

        served.checkpoints.set_expiry(state, -1)
        monkeypatch.setattr(served.checkpoints, "delete", refuse)
        await until(lambda: not served.sessions.ids_of(ME))


@pytest.mark.asyncio
async def test_a_client_that_sends_on_does_not_put_off_the_end_of_a_request_that_never_came(tmp_path: Path) -> None:
    async with serve(tmp_path, request_timeout_s=0.3) as (served, _):
        client = Client(served)
        model_id = await client.model()
        first = client.step(model_id, 2)  # 1 never comes
        for seq_id in range(3, 40):
            client.step(model_id, seq_id)
            if first.is_done:
                break
            await asyncio.sleep(0.05)
        assert "1 of the model never came" in str(first.error)
        assert seq_id < 39


def test_a_client_that_reads_nothing_costs_no_other_client_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "MAX_ANSWER_BYTES", 100)
    promises = Promises()
    for number, (session, size) in enumerate((("quiet", 10), ("greedy", 60), ("greedy", 60), ("greedy", 20))):
        promise = promises.make(f"{session}:train:0:{number}", ME)
        promise.resolve(Answer(b"x" * size))
        promise.finished_at = float(number)
    promises.forget_old(10.0)
    left = [number for number in range(4) if promises.known(f"{'greedy' if number else 'quiet'}:train:0:{number}")]
    assert left == [0, 2, 3]
