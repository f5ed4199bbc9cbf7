"""From the model file and the HF config to layers: GLM-5.2 in full size, and its constraints."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from slime.backends.megatron_utils.flags.config_builders import transformer_config_from_args
from slime.backends.megatron_utils.layers.layer_specs import get_block_spec
from slime.backends.megatron_utils.model_provider import get_model_provider
from slime.backends.megatron_utils.models import find_family
from slime.utils.errors import ConfigError
from slime_plugins.models.glm5.glm5 import first_layers_of_stages, get_glm5_spec, indexer_settings
from slime_plugins.models.glm5.index_sharing import PipelineSplitError
from tests.contracts.source_tree import REPO
from tests.matrix.families import deepseek_v32, glm5
from tests.unit.backends.megatron_utils.megatron_case import pack, parse, start_single_process

SEED_LAYOUT = "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 8 "
SEED_LAYOUT += "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 16 "
SEED_LAYOUT += "--context-parallel-size 8 --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 "
SEED_LAYOUT += "--actor-num-nodes 32 --actor-num-gpus-per-node 8"
TINY = next(case for case in glm5.CASES if case.name == "glm5_2")


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of GLM-5.2: the defaults of transformers' class except for sharing and the rotary base."""
    from transformers import GlmMoeDsaConfig

    folder = tmp_path_factory.mktemp("glm5.2")
    rope = {"rope_type": "default", "rope_theta": 8000000.0}
    config = GlmMoeDsaConfig(
        index_topk_freq=4, index_skip_topk_offset=3, rope_parameters=rope, architectures=["GlmMoeDsaForCausalLM"]
    )
    config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def model_file(name: str) -> list[str]:
    """MODEL_ARGS of a file of scripts/models."""
    command = f"source scripts/models/{name}.sh; printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
    done = subprocess.run(["bash", "-c", command], cwd=REPO, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def parse_full(folder: Path, *flags: str) -> Namespace:
    return parse("--hf-checkpoint", folder, *model_file("glm5.2-744B-A40B"), *flags)


def write_tiny(folder: Path, case: Any = TINY, **overrides: Any) -> Path:
    case.write_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **overrides}))
    return folder


def build_tiny(folder: Path, case: Any = TINY, *flags: str) -> torch.nn.Module:
    args = parse("--hf-checkpoint", folder, *case.flags(folder), *flags)
    start_single_process(args)
    return get_model_provider(args)()


def layers_with_indexer(model: torch.nn.Module) -> list[int]:
    return [int(name.split(".")[2]) + 1 for name, _ in model.named_parameters() if name.endswith("wq_b.weight")]


def test_the_model_file_makes_glm_5_2_in_its_full_size(full_size: Path) -> None:
    args = parse_full(full_size, "--no-initialization")
    start_single_process(args)
    with FakeTensorMode():
        model = get_model_provider(args)()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 1) == 743.4
    assert layers_with_indexer(model) == [1, 2, 3, *range(7, 76, 4)]
    attention = model.decoder.layers[6].self_attention
    assert attention.wq_b.weight.shape == (32 * 128, 2048) and attention.settings.topk == 2048
    assert attention.softmax_scale == pytest.approx(256**-0.5)


def test_the_stages_of_the_seed_are_built_with_14_then_8_then_16_layers(full_size: Path) -> None:
    args = parse_full(full_size, *SEED_LAYOUT.split())
    config = transformer_config_from_args(args)
    assert first_layers_of_stages(config, None) == [1, 15, 23, 31, 39, 47, 55, 63]
    computing = []
    try:
        for rank in range(8):
            parallel_state.set_pipeline_model_parallel_rank(rank)
            assert get_num_layers_to_build(config) == (14, *[8] * 6, 16)[rank]
            specs = get_glm5_spec(args, config).layer_specs
            computing.append([spec.submodules.self_attention.params["is_computing"] for spec in specs])
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)
    assert [len(stage) for stage in computing] == [14, *[8] * 6, 16]
    assert all(stage[0] for stage in computing) and sum(map(sum, computing)) == 21


def test_stages_that_begin_with_a_skip_layer_are_refused_on_every_rank(full_size: Path) -> None:
    # 78 layers are not divisible by 8; they are by 6, but the second stage would begin with layer 14.
    by_six = ("--pipeline-model-parallel-size", "6", "--actor-num-gpus-per-node", "6")
    message = "DSA index-share pipeline split is invalid.*starts at layer 14.*11 "
    with pytest.raises(PipelineSplitError, match=message):
        parse_full(full_size, *by_six)
    args = Namespace(**(vars(parse_full(full_size)) | {"pipeline_model_parallel_size": 6}))
    with pytest.raises(PipelineSplitError, match=message):
        get_glm5_spec(args, transformer_config_from_args(args))
    with pytest.raises(ConfigError, match="left for 8 pipeline stages .*must divide them"):
        parse_full(full_size, "--pipeline-model-parallel-size", "8", "--actor-num-gpus-per-node", "8")


def test_only_computing_layers_have_an_indexer_and_it_is_not_trained(tmp_path: Path) -> None:
    model = build_tiny(write_tiny(tmp_path))
    assert layers_with_indexer(model) == [1, 2, 3, 7]
    indexer = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {name.split("self_attention.")[1] for name in indexer} == {
        "wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias"
    }  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ("--recompute-granularity", "selective"),
        ("--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj"),
    ],
    ids=["full", "attention", "projection"],
)
def test_recomputation_changes_no_gradient(tmp_path: Path, flags: tuple[str, ...]) -> None:
    folder = write_tiny(tmp_path)
    tokens = [torch.randint(131, (length,)) for length in (20, 3, 30)]

    def gradients(*flags: str) -> dict[str, torch.Tensor]:
        model = build_tiny(folder, TINY, *flags)
        model.load_state_dict(state)
        packed, params = pack(tokens)
        logits = model(input_ids=packed, position_ids=None, attention_mask=None, packed_seq_params=params)
        logits.logsumexp(-1).mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}

    state = build_tiny(folder).state_dict()
    plain, recomputed = gradients(), gradients(*flags)
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        if gradient is not None:
            torch.testing.assert_close(recomputed[name], gradient, rtol=1e-5, atol=1e-7)


def test_a_choice_is_shared_within_a_micro_batch_and_not_across(tmp_path: Path) -> None:
    model = build_tiny(write_tiny(tmp_path)).eval()
    first, second = (pack([torch.randint(131, (20,))]) for _ in range(2))
    for tokens, params in (first, second):
        model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=params)
    assert sorted(first[1].chosen_keys) == sorted(second[1].chosen_keys) == [1, 2, 3, 7]
    assert not torch.equal(first[1].chosen_keys[3], second[1].chosen_keys[3])


def test_the_sizes_of_the_indexer_come_from_the_hf_config(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, deepseek_v32.CASE)
    args = parse("--hf-checkpoint", folder, *deepseek_v32.CASE.flags(folder))
    assert (args.dsa_indexer_n_heads, args.dsa_indexer_head_dim, args.dsa_indexer_topk) == (16, 20, 9)
    with pytest.raises(ConfigError, match="--dsa-indexer-topk is 8; index_topk is 9"):
        parse("--hf-checkpoint", folder, *deepseek_v32.CASE.flags(folder), "--dsa-indexer-topk", 8)


def test_the_indexers_rotary_pairs_follow_the_config_unless_the_environment_overrides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = find_family("glm_moe_dsa").completed({"model_type": "glm_moe_dsa"})
    monkeypatch.delenv("INDEXER_ROPE_NEOX_STYLE", raising=False)
    assert not indexer_settings(config).is_interleaved
    assert indexer_settings({**config, "indexer_rope_interleave": True}).is_interleaved
    monkeypatch.setenv("INDEXER_ROPE_NEOX_STYLE", "0")
    assert indexer_settings(config).is_interleaved
    monkeypatch.setenv("INDEXER_ROPE_NEOX_STYLE", "1")
    assert not indexer_settings({**config, "indexer_rope_interleave": True}).is_interleaved


def test_context_parallelism_needs_the_contiguous_cut_and_only_sparse_attention_knows_it(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    flags = [*TINY.flags(folder), "--context-parallel-size", "2", "--actor-num-gpus-per-node", "2"]
    zigzag = [flag for flag in flags if flag != "--allgather-cp"]
    with pytest.raises(ConfigError, match="--context-parallel-size is 2 without --allgather-cp"):
        parse("--hf-checkpoint", folder, *zigzag)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["DeepseekV3ForCausalLM"]}))
    with pytest.raises(ConfigError, match="only DeepseekV32ForCausalLM and GlmMoeDsaForCausalLM"):
        parse("--hf-checkpoint", folder, *flags)


def test_the_block_is_the_usual_one_but_for_its_attention(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    args = parse("--hf-checkpoint", folder, *TINY.flags(folder))
    start_single_process(args)
    config = transformer_config_from_args(args)
    for usual, sparse in zip(get_block_spec(config).layer_specs, get_glm5_spec(args, config).layer_specs, strict=True):
        parts, ours = usual.submodules, sparse.submodules
        assert type(parts) is type(ours) and usual.module is sparse.module
        assert getattr(parts.mlp, "module", parts.mlp) is getattr(ours.mlp, "module", ours.mlp)
        assert parts.self_attention.module is not ours.self_attention.module
