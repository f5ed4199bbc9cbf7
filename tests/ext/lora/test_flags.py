"""Which adapters are created and pushed to engines, and what is refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils import cpu_shim
from slime.compose import flag_groups, parse_args
from slime.ext.lora.engine_adapters import as_engines_call
from slime.ext.lora.targets import engine_settings
from slime.flags.parse import parse_flags
from slime.utils.errors import ConfigError, SlimeError
from tests.matrix.case import load_cases
from tests.matrix.trainer import make_args
from tests.unit.flags.broken_configurations import Broken
from tests.unit.flags.test_broken_configurations import flags_of_model, write_files

MISTAKES = (
    Broken(
        mistake="a template with another name in it",
        flags="--lora-rank 8 --save $folder/save --save-interval 1 --lora-save x/{step}",
        says=("--lora-save is 'x/{step}'; in braces it may only have",),
    ),
    Broken(
        mistake="the scale of adapters that are not there",
        flags="--lora-alpha 16",
        says=("--lora-alpha 16.0 has no effect without --lora-rank",),
    ),
    Broken(
        mistake="adapters beside frozen lists, pushed alone",
        flags="--lora-rank 8 --lora-push adapter --freeze-params-name-list embedding --check-weight-update-equal",
        says=(
            "--check-weight-update-equal and --lora-push adapter contradict each other",
            "--freeze-params-name-list embedding and --lora-rank 8 contradict each other",
        ),
    ),
    Broken(
        mistake="an adapter for engines that would join it with matrices that have none",
        flags="--lora-rank 8 --lora-push adapter --lora-target-modules q_proj v_proj",
        says=("SGLang joins k_proj, q_proj, v_proj", "has q_proj, v_proj alone"),
    ),
    Broken(
        mistake="frozen adapters for engines whose base changes, two of one name, and one of a push's",
        flags="--lora-rank 8 --lora-engine-adapters a=x a=y slime-7=z",
        says=("has no effect without --lora-push adapter", "two have one name", "slime-7=z: write NAME=DIR"),
    ),
    Broken(
        mistake="adapters on a layer that has another name",
        flags="--lora-rank 8 --lora-target-modules query_proj",
        says=("'query_proj', which no linear layer", "o_proj, q_proj"),
    ),
)


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.mistake)
def test_a_mistake_is_named_before_a_gpu_is_taken(case: Broken, tmp_path: Path) -> None:
    write_files(case, tmp_path)
    with pytest.raises(ConfigError) as caught:
        parse_args(argv=[*flags_of_model(case.script), *case.words(str(tmp_path))])
    assert [part for part in case.says if part not in str(caught.value)] == []


ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
MLP = ["down_proj", "gate_proj", "up_proj"]
LATENT = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]


def modules(family: str, folder: Path, *targets: str, **engine_flags: Any) -> list[str]:
    return settings_of(family, folder, *targets, **engine_flags)["lora_target_modules"]


def settings_of(family: str, folder: Path, *targets: str, **engine_flags: Any) -> dict[str, Any]:
    case = load_cases([family])[family]
    case.write_checkpoint(folder)
    frozen = replace(case, flags=lambda path: [flag for flag in case.flags(path) if flag != "--enable-mtp-training"])
    lora = ("--lora-rank", 4, "--moe-router-bias-update-rate", 0, "--lora-target-modules", *targets)
    args = make_args(frozen, folder, *lora)
    vars(args).update(lora_push="adapter", **engine_flags)  # a trainer alone does not read them
    return engine_settings(args)


@pytest.mark.parametrize(
    ("family", "targets", "served"),
    [
        ("qwen3_moe", ["all-linear"], sorted(ATTENTION + MLP)),
        ("glm4_moe", ["all-linear"], sorted(ATTENTION + MLP)),
        ("minimax_m2", ["all-linear"], sorted(ATTENTION + MLP)),
        ("minimax_m2", ["w1", "w2", "w3"], MLP),
        ("deepseek_v3", ["all-linear"], sorted(LATENT + MLP)),
        ("moonlight", ["kv_b_proj", "o_proj"], ["kv_b_proj", "o_proj"]),
        ("qwen2_moe", ["q_proj", "k_proj", "v_proj"], ["k_proj", "q_proj", "v_proj"]),
    ],
)  # fmt: skip
def test_engines_are_told_the_modules_under_their_own_names(
    family: str, targets: list[str], served: list[str], tmp_path: Path
) -> None:
    assert modules(family, tmp_path, *targets) == served


@pytest.mark.parametrize(
    ("family", "targets", "says"),
    [
        ("qwen3_moe", ["gate_proj", "up_proj"], "joins down_proj, gate_proj, up_proj, of which .* gate_proj, up_proj"),
        ("deepseek_v3", ["q_a_proj", "q_b_proj"], "joins kv_a_proj_with_mqa, q_a_proj, of which .* q_a_proj alone"),
        ("moonlight", ["all-linear"], "no adapters on kv_a_proj_with_mqa, q_proj of DeepSeek"),
        ("qwen2_moe", ["all-linear"], "no adapters on down_proj, gate_proj, up_proj of Qwen2"),
        ("qwen3_next", ["all-linear"], "no adapters on down_proj, gate_proj, in_proj_ba, in_proj_qkvz, k_proj"),
        ("gpt_oss", ["all-linear"], r"no adapters on .*gate_up_proj.* of gpt-oss"),
        ("gemma4", ["all-linear"], "no adapters on down_proj, gate_proj, k_proj, .* of Gemma 4"),
        ("deepseek_v4", ["all-linear"], "no adapters on wkv, wo_b, wq_a, wq_b of DeepSeek-V4"),
    ],
)
def test_what_engines_do_not_serve_is_refused_with_the_flag_to_change(
    family: str, targets: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"--lora-push adapter: .*{says}.*--lora-push merged"):
        modules(family, tmp_path, *targets)


@pytest.mark.parametrize(("family", "module"), [("deepseek_v4", "wo_a"), ("glm5", "kv_b_proj")])
def test_matrices_that_no_token_meets_have_no_adapter(family: str, module: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"has '{module}', which no linear layer .* to tokens is called"):
        modules(family, tmp_path, "linear_proj", module)


def test_a_family_is_known_by_any_spelling_of_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no adapters on down_proj, gate_proj, up_proj of Qwen2"):
        modules("qwen2_moe", tmp_path, "all-linear", model_name="Qwen2MoeForCausalLM")


def test_sglang_joins_the_adapters_of_experts_that_are_called_as_mixtrals() -> None:
    cpu_shim.install()
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig

    parent = "base_model.model.model.layers.0.block_sparse_moe.experts.3."
    tensors = {
        as_engines_call(f"{parent}{module}.lora_{matrix}.weight"): torch.rand(4, 6)
        for module in ("w1", "w2", "w3")
        for matrix in "AB"
    }
    config = LoRAConfig.from_dict({"peft_type": "LORA", "target_modules": MLP, "r": 4, "lora_alpha": 8})
    adapter = LoRAAdapter("one", config, SimpleNamespace(num_hidden_layers=1), None, None)
    adapter.initialize_weights_from_tensors(tensors)
    placed = adapter.layers[0].weights
    assert sorted(placed) == [
        f"{parent}{module}.lora_{x}.weight" for module in ("down_proj", "gate_up_proj") for x in "AB"
    ]
    for matrix in "AB":
        halves = [tensors[f"{parent}{module}.lora_{matrix}.weight"] for module in ("gate_proj", "up_proj")]
        assert placed[f"{parent}gate_up_proj.lora_{matrix}.weight"].equal(torch.cat(halves))


def folder_of(folder: Path, **content: Any) -> list[str]:
    plain = {"peft_type": "LORA", "r": 16, "lora_alpha": 8, "target_modules": ["down_proj", "gate_proj", "up_proj"]}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(plain | content))
    return [f"old={folder}"]


def test_engines_make_room_for_the_modules_and_the_rank_of_folders_too(tmp_path: Path) -> None:
    given = folder_of(tmp_path / "peft")
    flags = {"lora_engine_adapters": given, "offload_rollout": True}
    assert settings_of("qwen3_moe", tmp_path / "hf", "q_proj", "k_proj", "v_proj", **flags) == {
        "enable_lora": True,
        "max_lora_rank": 16,
        "lora_target_modules": sorted([*MLP, "q_proj", "k_proj", "v_proj"]),
        "lora_paths": given,
        "max_loras_per_batch": 4,  # the last two pushed, no adapter, and the folder's
        "enable_weights_cpu_backup": True,
        "disable_shared_experts_fusion": True,
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"target_modules": ["q_proj", "o_proj"]}, "joins k_proj, q_proj, v_proj.* or leave it out"),
        ({"target_modules": ["o_proj", "lm_head"]}, "no adapters on lm_head of Qwen2 MoE and Qwen3 MoE; leave it out"),
        ({"target_modules": "all-linear"}, "target_modules 'all-linear'; engines want"),
        ({"use_dora": True}, "only plain LoRA"),
        ({"r": None}, "has r None"),
    ],
)
def test_a_folder_that_engines_cannot_serve_is_refused_by_its_name(
    content: dict[str, Any], says: str, tmp_path: Path
) -> None:
    given = folder_of(tmp_path / "peft", **content)
    with pytest.raises(SlimeError, match=f"--lora-engine-adapters old=.*{says}"):
        settings_of("qwen3_moe", tmp_path / "hf", "o_proj", lora_engine_adapters=given)


def test_experts_behind_deepep_get_no_adapters(tmp_path: Path) -> None:
    deepep = {"sglang_moe_a2a_backend": "deepep"}
    assert modules("qwen3_moe", tmp_path, "q_proj", "k_proj", "v_proj", **deepep)
    with pytest.raises(ConfigError, match="--sglang-moe-a2a-backend deepep applies no adapters of experts"):
        modules("qwen3_moe", tmp_path, "all-linear", **deepep)


def test_the_home_folder_may_be_named_behind_an_adapters_name(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    args = parse_flags(["--lora-engine-adapters", "a=~/b", "c=/d"], groups=flag_groups())
    assert args.lora_engine_adapters == ["a=/home/me/b", "c=/d"]
