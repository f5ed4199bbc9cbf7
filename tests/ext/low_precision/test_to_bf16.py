"""Converting quantized model folders to bf16."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from slime.ext.low_precision.folders.run import rewrite_folder
from slime.ext.low_precision.folders.to_bf16 import Fp8ToBf16, Int4ToBf16
from slime.ext.low_precision.folders.to_quantized import to_fp8, to_int4
from slime.utils.errors import ConfigError, DataError
from slime.weights.quantize import read_format
from slime.weights.quantize.block_fp8 import dequantize_block, quantize_block
from slime.weights.quantize.formats import read_weight
from tests.ext.low_precision.checkpoints import read_folder, same_bytes, tensors_of, write_folder
from tests.matrix.case import load_cases, load_with_transformers, read_config, read_tensors

E8M0 = torch.ones(2, 2).to(torch.float8_e8m0fnu)
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("recipe", "back"),
    [
        (to_fp8(), Fp8ToBf16()),
        (to_fp8("block", [32, 64], "ue8m0"), Fp8ToBf16()),
        (to_fp8("channel"), Fp8ToBf16()),
        (to_fp8("tensor"), Fp8ToBf16()),
        (to_int4(), Int4ToBf16()),
        (to_int4(16, is_symmetric=False), Int4ToBf16()),
    ],
    ids=["block", "small blocks", "channel", "tensor", "int4", "int4 with zero points"],
)
def test_there_and_back_gives_what_the_formats_say(tmp_path, monkeypatch, recipe, back):
    monkeypatch.setattr("slime.ext.low_precision.folders.tensor_file.CHUNK_BYTES", {"cpu": 3000})
    tensors = tensors_of("deepseek_v32")
    source = write_folder(tmp_path / "plain", tensors)
    rewrite_folder(recipe, source, tmp_path / "quantized")
    rewrite_folder(back, tmp_path / "quantized", tmp_path / "back", workers=2)
    stored = read_folder(tmp_path / "quantized")
    weight_format = read_format(
        json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]
    )
    result = read_folder(tmp_path / "back")
    assert result.keys() == tensors.keys()
    for name, tensor in result.items():
        assert same_bytes(tensor, read_weight(name, stored.__getitem__, stored, weight_format)), name
        assert torch.allclose(tensor.float(), tensors[name].float(), atol=0.05), name
    assert (tmp_path / "back" / "config.json").read_text() == json.dumps(
        json.loads((source / "config.json").read_text()), indent=2
    ) + "\n"


def test_a_weight_and_its_scale_may_lie_in_different_shards(tmp_path):
    plain = tensors_of("qwen3")
    tensors = {name: tensor for name, tensor in plain.items() if "_proj" not in name}
    scales = {}
    for name in sorted(plain.keys() - tensors.keys()):
        tensors[name], scales[f"{name}_scale_inv"] = quantize_block(plain[name])
    # The last shard holds only scales; the first has no weight with a scale.
    source = write_folder(tmp_path / "fp8", tensors | scales, shards=5)
    report = rewrite_folder(Fp8ToBf16(), source, tmp_path / "bf16", workers=2)
    assert report.shards_written < 5
    result = read_folder(tmp_path / "bf16")
    assert result.keys() == plain.keys()
    for name, scale in scales.items():
        weight = name.removesuffix("_scale_inv")
        assert same_bytes(result[weight], dequantize_block(tensors[weight], scale))


def test_deepseek_v4_in_its_published_form_is_what_transformers_reads(tmp_path):
    """FP8 with exponents as scales, FP4 experts; e2m1 and e8m0 make every product exact."""
    case = load_cases(["deepseek_v4"])["deepseek_v4"]
    case = replace(case, config={**case.config, "hidden_size": 64, "moe_intermediate_size": 64})
    case.write_checkpoint(tmp_path / "plain")
    config, generator = read_config(tmp_path / "plain"), torch.Generator().manual_seed(3)
    tensors = {}
    for name, tensor in (plain := read_tensors(tmp_path / "plain")).items():
        scale_name = f"{name.removesuffix('.weight')}.scale"
        if ".ffn.experts." in name:
            tensors[name] = torch.randint(-128, 128, (64, 32), dtype=torch.int8, generator=generator)
            scale = torch.exp2(torch.randint(-7, -3, (64, 2), generator=generator).float())
        elif any(part in name for part in (".attn.w", "shared_experts", "indexer.wq_b")):
            tensors[name], scale = quantize_block(tensor, ue8m0=True)
        else:
            tensors[name] = tensor
            continue
        tensors[scale_name] = scale.to(torch.float8_e8m0fnu)
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    published = write_folder(
        tmp_path / "published", tensors, 3, config | {"expert_dtype": "fp4", "quantization_config": fp8}
    )
    rewrite_folder(Fp8ToBf16(), published, tmp_path / "bf16")
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()) == config
    assert {name: t.shape for name, t in read_folder(tmp_path / "bf16").items()} == {
        name: t.shape for name, t in plain.items()
    }
    there = AutoModelForCausalLM.from_pretrained(
        published, quantization_config=FineGrainedFP8Config(dequantize=True, scale_fmt="ue8m0"), dtype=torch.float32
    ).state_dict()
    ours = load_with_transformers(tmp_path / "bf16").state_dict()
    assert ours.keys() == there.keys()
    assert all(torch.equal(ours[name], there[name]) for name in ours)


def test_quantization_is_gone_from_every_part_of_the_config(tmp_path):
    weight, scale = quantize_block(torch.randn(64, 64), (32, 32))
    config = {
        "text_config": {
            "hidden_size": 64,
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
        },
        "compression_config": {},
    }
    source = write_folder(tmp_path / "fp8", {UP: weight, f"{UP}_scale_inv": scale}, 1, config)
    rewrite_folder(Fp8ToBf16(), source, tmp_path / "bf16")
    assert "quantiz" not in (tmp_path / "bf16" / "config.json").read_text()
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["text_config"] == {"hidden_size": 64}
    assert same_bytes(read_folder(tmp_path / "bf16")[UP], dequantize_block(weight, scale, (32, 32)))


def test_exponents_alone_are_scales_too(tmp_path):
    weight, scale = quantize_block(torch.randn(200, 130), ue8m0=True)
    exponents = scale.to(torch.float8_e8m0fnu)
    source = write_folder(tmp_path / "fp8", {UP: weight, f"{UP}_scale_inv": exponents}, shards=1)
    rewrite_folder(Fp8ToBf16(), source, tmp_path / "bf16")
    assert same_bytes(read_folder(tmp_path / "bf16")[UP], dequantize_block(weight, scale))


def test_stacked_experts_and_scales_of_activations(tmp_path):
    pairs = [quantize_block(torch.randn(130, 64)) for _ in range(3)]
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {name: torch.stack([q for q, _ in pairs]), f"{name}_scale_inv": torch.stack([s for _, s in pairs])}
    tensors |= {"model.layers.0.mlp.experts.input_scale": torch.ones(1), "model.norm.weight": torch.ones(4)}
    source = write_folder(tmp_path / "fp8", tensors, shards=1)
    rewrite_folder(Fp8ToBf16(), source, tmp_path / "bf16")
    result = read_folder(tmp_path / "bf16")
    assert result.keys() == {name, "model.norm.weight"}
    assert same_bytes(result[name], torch.stack([dequantize_block(*pair) for pair in pairs]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{UP}_scale_inv"), "1 FP8 tensors of .* have no scale"),
        (lambda t: t.pop(UP), "has no FP8 tensor"),
        (lambda t: t.update({"model.lost.weight_scale_inv": torch.ones(1)}), "1 scales of .* have no FP8 weight"),
        (
            lambda t: t.update({f"{UP}_scale_inv": torch.ones(2, 3)}),
            r"has shape \[2, 3\].*neither one scale per 128 x 128",
        ),
        (lambda t: t.update({f"{UP}_scale_inv": torch.ones(1, 1).int()}), "has dtype I32; scales are F32"),
        (lambda t: t.update({"head.scale": E8M0}), r"1 scales of .* have no FP8 weight: head\.scale"),
        (
            lambda t: t.update({"head.weight": torch.zeros(2, 16, dtype=torch.int8), "head.scale": E8M0}),
            r"has shape \[2, 2\], head\.weight has \[2, 16\] bytes of FP4",
        ),
    ],
)
def test_weights_and_scales_that_do_not_fit_are_refused(tmp_path, change, message):
    weight, scale = quantize_block(torch.randn(128, 128))
    tensors = {UP: weight, f"{UP}_scale_inv": scale, "model.norm.weight": torch.ones(4)}
    change(tensors)
    source = write_folder(tmp_path / "fp8", tensors, shards=1)
    with pytest.raises((ConfigError, DataError), match=message):
        rewrite_folder(Fp8ToBf16(), source, tmp_path / "bf16")
    assert not (tmp_path / "bf16").exists()


def test_packed_integers_need_their_parts_and_their_config(tmp_path):
    source = write_folder(tmp_path / "plain", tensors_of("qwen3", layers=1), shards=1)
    rewrite_folder(to_int4(), source, tmp_path / "int4")
    config = json.loads((tmp_path / "int4" / "config.json").read_text())
    tensors = read_folder(tmp_path / "int4")
    bare = write_folder(tmp_path / "bare", tensors, shards=1)
    with pytest.raises(ConfigError, match="--config-path may name another"):
        rewrite_folder(Int4ToBf16(), bare, tmp_path / "bf16")
    rewrite_folder(Int4ToBf16(config["quantization_config"]), bare, tmp_path / "bf16")
    assert read_folder(tmp_path / "bf16").keys() == tensors_of("qwen3", layers=1).keys()
    del tensors[UP.removesuffix("weight") + "weight_scale"]
    lacking = write_folder(tmp_path / "lacking", tensors, 1, config)
    with pytest.raises(DataError, match=r"lacks 1 tensors .* model\.layers\.0\.mlp\.up_proj\.weight_scale"):
        rewrite_folder(Int4ToBf16(), lacking, tmp_path / "again")
