"""Hooks in SGLang's processes, against SGLang's own classes: adapters stay on the GPU, a pause does not sleep."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils import cpu_shim

cpu_shim.install()
from sglang.srt.lora.lora import LoRAAdapter  # noqa: E402 - after the shim
from sglang.srt.lora.lora_config import LoRAConfig  # noqa: E402
from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput, PauseGenerationReqInput  # noqa: E402
from sglang.srt.managers.scheduler_components.weight_updater import (  # noqa: E402
    _export_static_state,
    _import_static_state,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402
from sglang.srt.utils import MultiprocessingSerializer  # noqa: E402
from sglang.srt.utils.aio_rwlock import RWLock  # noqa: E402
from torch.multiprocessing import reductions  # noqa: E402

from slime.backends.megatron_utils.sglang import serialize_bucket, share_host_tensors  # noqa: E402
from slime.backends.sglang_utils.sglang_plugin import (  # noqa: E402
    _gated_layers,
    _keep_own_scales,
    _pause,
    _read_adapter,
    _restore_own_scales,
    _take_adapter,
    _unload_adapter,
)
from slime.weights.push.adapter import IN_ONE_BUFFER  # noqa: E402
from slime.weights.push.wire import handle_of  # noqa: E402

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


class OnCard(torch.Tensor):
    """A tensor that says that it is not on the host, and is."""

    is_cpu = False


def taken(device: str, kind: type[torch.Tensor] = torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an adapter holds of its second layer, and what it was given."""
    adapter = LoRAAdapter("one", LoRAConfig.from_dict(CONFIG), SimpleNamespace(num_hidden_layers=2), None, None)  # type: ignore[arg-type]
    given = {
        f"base_model.model.model.layers.1.self_attn.{module}.lora_{matrix}.weight": torch.full(
            shape, value, device=device
        ).as_subclass(kind)
        for module, rows, value in (("q_proj", 8, 1.0), ("k_proj", 4, 2.0), ("v_proj", 4, 3.0), ("o_proj", 6, 4.0))
        for matrix, shape in (("A", (2, 6)), ("B", (rows, 2)))
    }
    _take_adapter(LoRAAdapter.initialize_weights_from_tensors, adapter, given)
    return adapter.layers[1].weights, given


def test_an_adapter_on_the_card_is_held_there_as_one_on_the_host_is_on_the_host() -> None:
    on_host, _ = taken("cpu")
    on_card, given = taken("meta")
    assert {one.device.type for one in on_card.values()} == {"meta"}
    shapes = [{name: one.shape for name, one in held.items()} for held in (on_card, on_host)]
    assert shapes[0] == shapes[1]
    assert on_card["base_model.model.model.layers.1.self_attn.qkv_proj.lora_B.weight"].shape == (16, 2)
    assert not {id(one) for one in on_card.values()} & {id(one) for one in given.values()}
    copied, given = taken("cpu", OnCard)
    for tensor in given.values():
        tensor.zero_()  # the trainer's memory holds something else
    assert copied.keys() == on_host.keys() and all(copied[name].equal(on_host[name]) for name in on_host)


class Manager:
    """A tokenizer manager with a request under way that ends some turns of the loop after its abort."""

    def __init__(self) -> None:
        self.is_pause, self.is_pause_cond, self.model_update_lock = False, asyncio.Condition(), RWLock()
        self.aborted = asyncio.Event()

    def abort_request(self, abort_all: bool) -> None:
        self.aborted.set()

    async def answer(self, turns: int) -> bool:
        """Give whether requests were held when this one ended."""
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
    # SGLang's own pause would wait a second: when it no longer does, the hook can go.
    assert (1.0 in slept) is not is_hooked


def test_modules_of_a_model_are_walked_for_the_first_adapter_alone() -> None:
    walks: list[torch.nn.Module] = []
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    found = [
        _gated_layers(lambda model: walks.append(model) or {0: model is one}, model) for model in (one, other, one)
    ]
    assert found == [{0: True}, {0: False}, {0: True}]
    assert walks == [one, other]


def test_an_adapter_goes_without_a_look_at_the_free_memory() -> None:
    def original(*_: object) -> None:
        raise AssertionError("it empties torch's cache")

    gone: list[str] = []
    runner = SimpleNamespace(lora_manager=SimpleNamespace(unload_lora_adapter=lambda ref: gone.append(ref) or "done"))
    assert _unload_adapter(original, runner, "one") == "done"
    assert gone == ["one"]


def test_handles_of_gpus_can_be_read_before_the_first_push_and_those_of_host_memory_still_be_made() -> None:
    stock, loaded = SimpleNamespace(load_format=None), list[Any]()
    assert _read_adapter(lambda *_: hasattr(reductions, "_rebuild_cuda_tensor_original"), None, stock)
    tensor = torch.arange(4.0)
    with pytest.raises(IndexError):  # SGLang's patch alone
        serialize_bucket([("one", tensor)])
    share_host_tensors()
    share_host_tensors()
    text, _buffer = serialize_bucket([("one", tensor)])
    held = MultiprocessingSerializer.deserialize(text)["flattened_tensor"]
    assert held.view(torch.float32).equal(tensor)

    ours = LoadLoRAAdapterFromTensorsReqInput(
        lora_name="slime-1", config_dict={"r": 2}, lora_id="id", load_format=IN_ONE_BUFFER,
        serialized_tensors=handle_of((tensor, [("a", (1, 1)), ("b", (3, 1))])),
    )  # fmt: skip
    runner = SimpleNamespace(load_lora_adapter_from_tensors=lambda *given: loaded.extend(given) or "done")
    assert _read_adapter(lambda *_: None, SimpleNamespace(model_runner=runner), ours) == "done"
    assert (loaded[0].lora_name, loaded[2:]) == ("slime-1", [{"r": 2}, None])
    assert {name: one.tolist() for name, one in loaded[1].items()} == {"a": [[0.0]], "b": [[1.0], [2.0], [3.0]]}


def test_scales_that_no_push_brings_outlast_a_sleep() -> None:
    model = torch.nn.Module()
    model.attn = torch.nn.Module()
    model.attn.k_scale = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
    model.attn.weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    model.attn.register_buffer("table", torch.ones(3))
    state = _keep_own_scales(_export_static_state, model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float("nan"))
    _restore_own_scales(_import_static_state, model, state)
    assert model.attn.k_scale == 1.0 and model.attn.table.tolist() == [1.0] * 3
    assert model.attn.weight.isnan().all()  # the push brings it
