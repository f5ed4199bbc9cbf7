"""Weights convert from Hugging Face to Megatron and back, bit for bit."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.hf_to_megatron.tensors import HfTensors, MissingTensorError
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
from slime.backends.megatron_utils.model_provider import ModelProvider, get_model_provider
from slime.utils.errors import ConfigError, DataError
from tests.matrix.case import load_cases, read_config
from tests.unit.backends.megatron_utils.megatron_case import (
    hf_flags,
    parse,
    start_single_process,
    write_hf_model,
)


def load(folder: Path, *flags: str) -> tuple[object, torch.nn.Module]:
    args = parse(*hf_flags(folder), *flags)
    start_single_process(args)
    model = get_model_provider(args)()
    load_hf_weights(args, [model], folder)
    return args, model


def test_padding_rows_of_the_vocabulary_are_zero_and_never_exported(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "qwen3")
    args, model = load(tmp_path)
    embedding = model.embedding.word_embeddings.weight
    assert embedding.shape[0] == args.padded_vocab_size == 136
    assert not embedding[131:].any()
    [(_, exported)] = convert_to_hf(args, "qwen3", "embedding.word_embeddings.weight", embedding)
    assert exported.shape[0] == 131


def argparse_like() -> object:
    """The flags that layouts read, for a model with four heads of width two in two groups."""
    return Namespace(
        num_layers=2,
        num_attention_heads=4,
        num_query_groups=2,
        group_query_attention=True,
        kv_channels=2,
        hidden_size=4,
        vocab_size=5,
        padded_vocab_size=8,
        untie_embeddings_and_output_weights=True,
        num_experts=None,
        mtp_num_layers=None,
    )


def test_a_fused_qkv_is_split_by_groups() -> None:
    # Two groups of two query heads: rows q0 q1 k0 v0 | q2 q3 k1 v1, each head of width 2.
    rows = torch.arange(16.0)[:, None].expand(16, 4)
    converted = dict(
        convert_to_hf(argparse_like(), "qwen3", "decoder.layers.0.self_attention.linear_qkv.weight", rows)
    )
    prefix = "model.layers.0.self_attn."
    assert converted[prefix + "q_proj.weight"][:, 0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert converted[prefix + "k_proj.weight"][:, 0].tolist() == [4, 5, 12, 13]
    assert converted[prefix + "v_proj.weight"][:, 0].tolist() == [6, 7, 14, 15]


def test_an_unknown_model_type_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "qwen3")
    args, model = load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "fancy"}))
    with pytest.raises(ConfigError, match="'fancy'.*llama, .*qwen2, .*qwen3"):
        load_hf_weights(args, [model], tmp_path)


def test_an_unknown_model_type_is_read_as_the_family_of_model_name(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "qwen3")
    args, model = load(tmp_path)
    wanted = model.output_layer.weight.clone()
    torch.nn.init.zeros_(model.output_layer.weight)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "fancy"}))
    args.model_name = "Qwen3ForCausalLM"
    load_hf_weights(args, [model], tmp_path)
    assert torch.equal(model.output_layer.weight, wanted)


def test_a_target_that_is_quantized_in_an_unknown_way_is_refused() -> None:
    args = argparse_like()
    args.hf_checkpoint = "nowhere"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="quantized .gptq.; weights can be made for.*fp8 .e4m3.*compressed-tensors"):
        convert_to_hf(args, "qwen3", "output_layer.weight", torch.ones(8, 4), {"quant_method": "gptq"})


def test_a_checkpoint_of_another_family_is_refused(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "qwen3")
    args, model = load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
    with pytest.raises(DataError, match=r"family DeepSeek-V3.*has no decoder\.layers\.0\.self_attention\.linear_qkv"):
        load_hf_weights(args, [model], tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(KeyError, match="model.layers.1.mlp.up_proj.weight") as caught:
        load(tmp_path)
    assert isinstance(caught.value, MissingTensorError)


def test_the_value_head_of_a_critic_keeps_its_values(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "qwen3")
    args = parse(*hf_flags(tmp_path))
    start_single_process(args)
    critic = get_model_provider(args, role="critic")()
    before = critic.output_layer.weight.clone()
    load_hf_weights(args, [critic], tmp_path)
    assert torch.equal(critic.output_layer.weight, before)


def test_one_byte_tensors_with_scales_are_dequantized(tmp_path: Path) -> None:
    weight = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).to(torch.float8_e4m3fn)
    save_file({"w": weight, "w_scale_inv": torch.tensor([[0.5]])}, tmp_path / "model.safetensors")
    with HfTensors(tmp_path) as tensors:
        assert tensors.names() == ["w"]
        assert tensors.get("w").tolist() == [[0.5, 1.0], [2.0, 4.0]]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors at all")
    with pytest.raises(DataError, match="model.safetensors is no whole safetensors file"):
        HfTensors(tmp_path)


def edit(folder: Path, **tensors: torch.Tensor) -> None:
    """Add tensors to a model's only file; "__" in a name stands for a dot."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, file)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named_with_its_place(tmp_path: Path, value: float) -> None:
    write_hf_model(tmp_path, "qwen3")
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(tmp_path / "model.safetensors")[name].clone()
    weight[2, 3] = value
    edit(tmp_path, **{name: weight})
    with pytest.raises(DataError, match=rf"model\.safetensors: {name} is -?(nan|inf) at \[2, 3\], one of 1"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["score.weight", "model.layers.9.mlp.up_proj.weight", "model.embed_positions.weight", "visual.x", "mtp.fc"]
)
def test_a_tensor_too_many_is_an_error_with_its_file(tmp_path: Path, name: str) -> None:
    write_hf_model(tmp_path, "qwen3")
    edit(tmp_path, **{name: torch.ones(2)})
    with pytest.raises(DataError, match=rf"model\.safetensors: 1 tensors have no place in the model, such as {name}"):
        load(tmp_path)


def test_tensors_that_families_may_have_beside_the_model_are_passed_over(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "qwen3")
    edit(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    load(tmp_path)


def test_an_output_projection_beside_a_tied_embedding_must_be_a_copy_of_it(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "qwen3", tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit(tmp_path, **{"lm_head.weight": embedding.clone()})
    load(tmp_path)
    edit(tmp_path, **{"lm_head.weight": embedding + 1})
    with pytest.raises(DataError, match="lm_head.weight differs from the embedding, and tie_word_embeddings"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe", "glm4v", "qwen3_5_vl"])
def test_the_head_of_a_folder_with_parts_is_read_where_its_top_says_so(tmp_path: Path, kind: str) -> None:
    case = load_cases([kind])[kind]
    case.write_checkpoint(tmp_path)
    config = read_config(tmp_path)
    config |= {"tie_word_embeddings": False, "text_config": config["text_config"] | {"tie_word_embeddings": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    head = torch.randn(tensors["model.language_model.embed_tokens.weight"].shape)
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    args = parse("--hf-checkpoint", tmp_path, "--fp32")
    assert args.untie_embeddings_and_output_weights
    start_single_process(args)
    model = get_model_provider(args)()
    load_hf_weights(args, [model], tmp_path)
    assert model.output_layer.weight[: len(head)].equal(head)


def test_a_stack_of_more_experts_than_the_model_has_is_an_error(tmp_path: Path) -> None:
    case = load_cases(["gpt_oss"])["gpt_oss"]
    case.write_checkpoint(tmp_path)
    args = parse("--hf-checkpoint", tmp_path, *case.flags(tmp_path))
    start_single_process(args)
    name = "model.layers.0.mlp.experts.down_proj"
    stack = load_file(tmp_path / "model.safetensors")[name]
    edit(tmp_path, **{name: torch.cat([stack, stack[:1]])})
    with pytest.raises(DataError, match=rf"1 tensors have no place in the model, such as {name}\[{len(stack)}\]"):
        load_hf_weights(args, [get_model_provider(args)()], tmp_path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.0.gate_proj.bias"),
        ("qwen3_moe", "model.layers.1.mlp.experts.99.gate_proj.weight"),
        ("mimo", "model.mtp_layers.0.input_proj.bias"),
        ("qwen3_next", "mtp.fc.bias"),
    ],
)
def test_a_tensor_that_no_part_of_the_model_reads_is_an_error(tmp_path: Path, kind: str, name: str) -> None:
    case = load_cases([kind])[kind]
    case.write_checkpoint(tmp_path)
    args = parse("--hf-checkpoint", tmp_path, *case.flags(tmp_path))
    start_single_process(args)
    check_extra_tensor(args, get_model_provider(args), tmp_path, name)


def check_extra_tensor(args: Namespace, build: ModelProvider, folder: Path, name: str) -> None:
    """Check that a folder loads, and is refused once it has a tensor of this name."""
    load_hf_weights(args, [build()], folder)
    edit(folder, **{name: torch.ones(2)})
    with pytest.raises(DataError, match=f"1 tensors have no place in the model, such as {name}"):
        load_hf_weights(args, [build()], folder)


def test_two_files_with_one_tensor_are_an_error(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "qwen3")
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "more.safetensors")
    with pytest.raises(DataError, match=r"model\.norm\.weight is stored twice, in .* and in .*"):
        load(tmp_path)
