"""Hooks for pushed adapters, against SGLang's own classes: they stay on the GPU, requests use the last one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils import cpu_shim

cpu_shim.install()
from sglang.srt.lora.lora import LoRAAdapter  # noqa: E402 - after the shim
from sglang.srt.lora.lora_config import LoRAConfig  # noqa: E402
from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput  # noqa: E402
from sglang.srt.utils import MultiprocessingSerializer  # noqa: E402
from torch.multiprocessing import reductions  # noqa: E402

from slime.backends.megatron_utils.sglang import serialize_bucket, share_host_tensors  # noqa: E402
from slime.ext.lora import sglang_plugin  # noqa: E402
from slime.ext.lora.engine_adapters import IN_ONE_BUFFER  # noqa: E402
from slime.ext.lora.sglang_plugin import (  # noqa: E402
    _choose_adapter,
    _gated_layers,
    _generate,
    _read_adapter,
    _take_adapter,
    _unload_adapter,
)
from slime.weights.push.wire import handle_of  # noqa: E402

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


class OnCard(torch.Tensor):
    """A host tensor that claims to be on a GPU."""

    is_cpu = False


def taken(device: str, kind: type[torch.Tensor] = torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """An adapter's second layer, and its inputs."""
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
        tensor.zero_()  # the trainer reuses its memory
    assert copied.keys() == on_host.keys() and all(copied[name].equal(on_host[name]) for name in on_host)


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
    with pytest.raises(IndexError):  # with only SGLang's patch
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


def test_a_request_without_adapter_runs_on_the_last_one_and_keeps_its_version():
    held = {"slime-4": SimpleNamespace(lora_name="slime-4")}
    registry = SimpleNamespace(get_all_adapters=lambda: held)
    settings = SimpleNamespace(enable_lora=True, weight_version="4")
    manager = SimpleNamespace(server_args=settings, lora_registry=registry)
    request, other = SimpleNamespace(lora_path=None, rid="1"), SimpleNamespace(lora_path="mine", rid="2")
    probe = SimpleNamespace(lora_path=None, rid="HEALTH_CHECK_1")
    assert (_choose_adapter(manager, probe), probe.lora_path) == (None, None)
    assert (_choose_adapter(manager, request), request.lora_path) == ("4", "slime-4")
    assert (_choose_adapter(manager, other), other.lora_path) == (None, "mine")
    settings.weight_version = "default"  # before the first push: the base model
    request.lora_path = None
    assert (_choose_adapter(manager, request), request.lora_path) == (None, None)


@pytest.mark.parametrize(("name", "success", "served"), [
    ("slime-5", True, "5"), ("slime-5", False, "4"), ("mine", True, "4"),
])  # fmt: skip
def test_an_adapter_of_a_push_is_served_once_it_is_loaded(name, success, served):
    settings = SimpleNamespace(weight_version="4")

    async def load(manager: Any, request: Any) -> Any:
        assert settings.weight_version == "4"
        return SimpleNamespace(success=success)

    manager = SimpleNamespace(server_args=settings)
    answer = asyncio.run(sglang_plugin._serve_adapter(load, manager, SimpleNamespace(lora_name=name)))
    assert (answer.success, settings.weight_version) == (success, served)


def test_an_answer_has_the_version_of_the_adapter_that_its_request_began_with():
    held = {"slime-4": SimpleNamespace(lora_name="slime-4", lora_id="id")}
    settings = SimpleNamespace(enable_lora=True, weight_version="4")
    manager = SimpleNamespace(server_args=settings, lora_registry=SimpleNamespace(get_all_adapters=lambda: held))

    async def answers(manager: Any, obj: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        settings.weight_version = "5"
        yield {"meta_info": {"weight_version": settings.weight_version}}

    async def ask() -> list[Any]:
        return [one async for one in _generate(answers, manager, SimpleNamespace(lora_path=None, rid="1"))]

    assert asyncio.run(ask()) == [{"meta_info": {"weight_version": "4"}}]


def test_an_adapter_is_unloaded_though_a_request_was_never_counted_down(monkeypatch):
    monkeypatch.setattr(sglang_plugin, "LOST_COUNT_S", 0.3)
    registry, order = SimpleNamespace(_counters={"id": 1}), []

    async def count_down(registry: Any, lora_id: str) -> None:
        await asyncio.Event().wait()

    async def request() -> None:
        async with sglang_plugin._counted("id"):
            await asyncio.sleep(0.6)
            order.append("the request ends")

    async def unload() -> None:
        await asyncio.sleep(0.05)
        await sglang_plugin._wait_for_unload(count_down, registry, "id")
        order.append("the adapter goes")

    async def both() -> None:
        await asyncio.wait_for(asyncio.gather(request(), unload()), timeout=20)

    asyncio.run(both())
    assert order == ["the request ends", "the adapter goes"]
    assert registry._counters == {} and "id" not in sglang_plugin._running
