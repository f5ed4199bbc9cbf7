"""The planned memory for adapters in an engine, against the pool that SGLang creates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.published_configs import PUBLISHED
from slime.backends.sglang_utils import cpu_shim
from slime.ext.plan.engines import AdapterSlots, EngineShape, adapter_slot_bytes
from tests.ext.plan.test_parameters import dims_of, model_args
from tests.unit.backends.megatron_utils.megatron_case import parse

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
RANK, COUNT = 16, 4


def pool_bytes(name: str, modules: list[str], tp_size: int, *, has_experts: bool) -> int:
    """What SGLang allocates for a model of this name, on the meta device."""
    cpu_shim.install()
    from sglang.srt.lora.mem_pool import LoRAMemoryPool
    from sglang.srt.lora.utils import get_normalized_target_modules
    from transformers import AutoConfig

    class Pool(LoRAMemoryPool):
        @staticmethod
        def _has_moe_module(base_model: object) -> bool:
            return has_experts

    config = AutoConfig.for_model(**PUBLISHED[name])
    model = SimpleNamespace(config=config, parameters=lambda: iter([torch.empty(1, device="meta")]))
    targets = get_normalized_target_modules(modules)
    pool = Pool(config, COUNT, torch.bfloat16, tp_size, 0, RANK, targets, model, "lru", 0)
    return sum(one.nbytes for side in (pool.A_buffer, pool.B_buffer) for layers in side.values() for one in layers)


@pytest.mark.parametrize(
    ("name", "modules", "tp_size"),
    [
        ("qwen3-4B", ATTENTION + MLP, 2),
        ("qwen3-4B", ATTENTION[:3], 1),
        ("glm4-9B", [*ATTENTION, "gate_up_proj", "down_proj"], 1),
        ("qwen3-30B-A3B", ATTENTION + MLP, 1),
        ("deepseek-v3", LATENT + MLP, 1),
        ("deepseek-v3", LATENT, 1),
    ],
)
def test_slots_are_counted_as_sglang_allocates_them(name: str, modules: list[str], tp_size: int) -> None:
    dims = dims_of(parse(*model_args(name), "--bf16"))
    engine = EngineShape(tp_size=tp_size, adapter_slots=AdapterSlots(tuple(modules), RANK, COUNT))
    expected = pool_bytes(name, modules, tp_size, has_experts=bool(dims.num_experts))
    assert adapter_slot_bytes(dims, engine) == expected > 2**25
