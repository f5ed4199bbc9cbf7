"""An adapter that comes in memory of the GPU stays there, as SGLang's own adapter holds it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from slime.backends.sglang_utils import cpu_shim

cpu_shim.install()
from sglang.srt.lora.lora import LoRAAdapter  # noqa: E402 - after the shim
from sglang.srt.lora.lora_config import LoRAConfig  # noqa: E402

from slime.backends.sglang_utils.sglang_plugin import _take_adapter  # noqa: E402

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def taken(device: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What an adapter holds of its second layer, and what it was given."""
    adapter = LoRAAdapter("one", LoRAConfig.from_dict(CONFIG), SimpleNamespace(num_hidden_layers=2), None, None)  # type: ignore[arg-type]
    given = {
        f"base_model.model.model.layers.1.self_attn.{module}.lora_{matrix}.weight": torch.ones(shape, device=device)
        for module, rows in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4), ("o_proj", 6))
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
