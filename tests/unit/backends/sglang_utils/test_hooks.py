"""The families' patches of SGLang, against its own classes."""

from __future__ import annotations

import pkgutil
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from slime.backends.sglang_utils import cpu_shim, hooks
from slime.backends.sglang_utils.hooks import family_hooks
from slime_plugins.models.gemma4 import sglang_hooks as gemma4
from slime_plugins.models.glm4 import sglang_hooks as glm4v
from slime_plugins.models.mistral3 import sglang_hooks as mistral3
from slime_plugins.models.olmo3 import sglang_hooks as olmo3


def test_every_hook_is_for_a_function_that_sglang_has():
    cpu_shim.install()
    targets = [target for target, _, _ in family_hooks()]
    assert {target for target, _, _ in (*glm4v.HOOKS, *olmo3.HOOKS)} <= set(targets)
    assert all(callable(pkgutil.resolve_name(target)) for target in targets)


def test_glm_counts_the_positions_of_ids_that_their_text_would_not_give_again():
    cpu_shim.install()
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    config = SimpleNamespace(
        image_token_id=9, video_start_token_id=7, video_end_token_id=8,
        vision_config=SimpleNamespace(spatial_merge_size=2),
    )  # fmt: skip
    asked = {"input_ids": torch.tensor([[1, 9, 9, 2, 3]]), "hf_config": config, "video_grid_thw": None}
    asked |= {"image_grid_thw": torch.tensor([[1, 2, 4]]), "attention_mask": torch.ones(1, 6)}
    with pytest.raises(IndexError):
        MRotaryEmbedding.get_rope_index_glm4v(**asked)
    positions, _ = glm4v.positions_of_ids(MRotaryEmbedding.get_rope_index_glm4v, **asked)
    assert positions[:, 0].tolist() == [[0, 1, 1, 3, 4], [0, 1, 1, 3, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_olmo3_reads_the_rotary_settings_of_config_json(spelling: str) -> None:
    cpu_shim.install()
    from sglang.srt.configs.olmo3 import Olmo3Config

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    given = {"rope_parameters": {**yarn, "rope_theta": 5e5}} if spelling == "rope_parameters" else {}
    config = Olmo3Config.__new__(Olmo3Config)
    olmo3.rotary_settings(Olmo3Config.__init__, config, **(given or {"rope_scaling": yarn, "rope_theta": 5e5}))
    assert (config.rope_theta, config.rope_scaling["rope_theta"], config.rope_scaling["factor"]) == (5e5, 5e5, 4.0)


def test_gemma4_routes_by_the_factor_of_the_last_push() -> None:
    cpu_shim.install()
    from sglang.srt.models.gemma4_causal import Gemma4Router

    router = Gemma4Router(SimpleNamespace(hidden_size=4, rms_norm_eps=0.0, num_experts=2))
    router.proj.weight.data = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
    x = torch.tensor([[2.0, 2.0, -2.0, -2.0]])
    for factor in ([1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]):
        router.scale.data = torch.tensor(factor)
        with torch.no_grad():
            logits = gemma4.with_present_factor(Gemma4Router.forward, router, x)
        expected = router.proj.weight @ (x[0].sign() * router.scale / 2)
        torch.testing.assert_close(logits[0], expected.detach())


def test_gemma4_experts_on_a_cpu_are_those_of_transformers() -> None:
    cpu_shim.install()
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts

    sizes = {"hidden_size": 8, "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 5}
    experts = Gemma4TextExperts(Gemma4TextConfig(enable_moe_block=True, **sizes))
    weights = {name: parameter.data.normal_() for name, parameter in experts.named_parameters()}
    x, ids, shares = torch.randn(4, 8), torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2]]), torch.rand(4, 2)
    layer = SimpleNamespace(num_experts=3, w13_weight=weights["gate_up_proj"], w2_weight=weights["down_proj"])
    method = SimpleNamespace(
        moe_runner_config=SimpleNamespace(activation="gelu", apply_router_weight_on_input=False, gemm1_alpha=None)
    )
    dispatched = SimpleNamespace(hidden_states=x, topk_output=(shares, ids, None))
    output = gemma4.gated_by_gelu(
        UnquantizedFusedMoEMethod.forward_cpu, method, layer=layer, dispatch_output=dispatched
    )
    torch.testing.assert_close(output.hidden_states, experts(x, ids, shares).detach())


def test_mistral3_finds_the_classes_of_its_parts_and_imports_no_other_model() -> None:
    import transformers

    auto = {"MistralConfig": transformers.AutoModelForCausalLM, "PixtralVisionConfig": transformers.AutoModel}
    expected = {config: auto[config]._model_mapping[getattr(transformers, config)].__name__ for config in auto}
    before = set(sys.modules)
    assert {config: mistral3.by_name(pytest.fail, None, auto[config])[config] for config in auto} == expected
    assert not set(sys.modules) - before


@pytest.mark.parametrize(("only_version", "num_hooks"), [(None, 1), (cpu_shim.TESTED_SGLANG, 1), ("0.0.1", 0)])
def test_a_hook_is_registered_once_and_only_for_the_version_that_it_needs(
    only_version: str | None, num_hooks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_shim.install()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    monkeypatch.setattr(hooks, "_registered", set())
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    for _ in range(2):
        hooks.register_hooks([("sglang.a.function", pytest.fail, "before")], only_version=only_version)
    assert [(one, when) for when, one, _ in HookRegistry._hooks["sglang.a.function"]] == (
        [(pytest.fail, HookType.BEFORE)] * num_hooks
    )
