"""Hooks in SGLang's processes, against SGLang's own classes: a pause returns early, scales survive a sleep."""

from __future__ import annotations

import asyncio
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slime.backends.sglang_utils import cpu_shim

cpu_shim.install()
from sglang.srt.managers.io_struct import PauseGenerationReqInput  # noqa: E402 - after the shim
from sglang.srt.managers.scheduler_components.weight_updater import (  # noqa: E402
    _export_static_state,
    _import_static_state,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402
from sglang.srt.utils.aio_rwlock import RWLock  # noqa: E402

from slime.backends.sglang_utils.sglang_plugin import (  # noqa: E402
    MAX_CONSTANT_BYTES,
    _keep_unpushed,
    _pause,
    _restore_unpushed,
    build_sampling_kernels,
    whole_window,
)


class Manager:
    """A tokenizer manager with a running request that ends some event-loop iterations after its abort."""

    def __init__(self) -> None:
        self.is_pause, self.is_pause_cond, self.model_update_lock = False, asyncio.Condition(), RWLock()
        self.aborted = asyncio.Event()

    def abort_request(self, abort_all: bool) -> None:
        self.aborted.set()

    async def answer(self, turns: int) -> bool:
        """Return whether requests were held back when this one ended."""
        async with self.model_update_lock.reader_lock:
            await self.aborted.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            return self.is_pause


@pytest.mark.parametrize("is_hooked", [True, False])
def test_a_pause_ends_when_aborted_requests_have(is_hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def record(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    async def run() -> bool:
        manager, pause = Manager(), TokenizerManager.pause_generation
        request = asyncio.ensure_future(manager.answer(turns=5))
        await sleep(0)
        monkeypatch.setattr(asyncio, "sleep", record)
        asked = PauseGenerationReqInput(mode="abort")
        await (_pause(pause, manager, asked) if is_hooked else pause(manager, asked))  # type: ignore[arg-type]
        assert manager.is_pause and request.done()
        return await request

    assert asyncio.run(run())
    # SGLang's own pause would wait a second; when it no longer does, remove the hook.
    assert (1.0 in slept) is not is_hooked


def test_what_no_push_restores_survives_a_sleep() -> None:
    model = torch.nn.Module()
    model.attn = torch.nn.Module()
    model.attn.k_scale = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
    model.attn.weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    model.attn.register_buffer("table", torch.ones(3))
    model.attn.factor = torch.tensor(0.5)  # as in Gemma 4's E forms: neither parameter nor buffer
    model.attn.w_kc = torch.ones(MAX_CONSTANT_BYTES // 4 + 1)
    state = _keep_unpushed(_export_static_state, model)
    for tensor in (*model.parameters(), *model.buffers(), model.attn.factor, model.attn.w_kc):
        tensor.data.fill_(float("nan"))
    _restore_unpushed(_import_static_state, model, state)
    assert model.attn.k_scale == 1.0 and model.attn.table.tolist() == [1.0] * 3
    assert model.attn.factor == 0.5
    assert model.attn.weight.isnan().all() and model.attn.w_kc.isnan().all()  # the push sets them


@pytest.mark.parametrize(("given", "seen"), [(4, 5), (None, None), (-1, -1)])
def test_a_window_of_tritons_decoding_counts_the_token_itself(given: int | None, seen: int | None) -> None:
    backend = SimpleNamespace(sliding_window_size=given)
    whole_window(None, backend)
    assert backend.sliding_window_size == seen


@pytest.mark.parametrize(
    ("backend", "drafts", "builds"),
    [
        ("flashinfer", None, True),
        ("pytorch", "EAGLE", True),
        ("pytorch", None, False),
    ],
)
def test_kernels_that_sample_are_built_before_the_engine_serves(
    backend: str, drafts: str | None, builds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.sampling")
    package.__spec__ = ModuleSpec("flashinfer", None)
    module.get_sampling_module = lambda: built.append(1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)
    flags = SimpleNamespace(sampling_backend=backend, speculative_algorithm=drafts)
    build_sampling_kernels(None, SimpleNamespace(server_args=flags))
    assert bool(built) == builds
