"""Converting plain model folders to quantized ones: which tensors, with which bytes, and config.json."""

import json

import pytest
import torch

from slime.backends.megatron_utils.models import find_weight_map
from slime.ext.low_precision.folders.run import rewrite_folder
from slime.ext.low_precision.folders.to_quantized import PLAIN_IN_INT4, to_fp8, to_int4
from slime.utils.errors import ConfigError, DataError
from slime.weights.quantize import Quantizer, quantized_names, read_quantization
from slime.weights.quantize.block_fp8 import quantize_block, quantize_channel, quantize_tensor
from slime.weights.quantize.formats import PlainWeights
from slime.weights.stacked_experts import by_expert
from slime.weights.stored_tensors import stored_codes
from tests.ext.low_precision.checkpoints import QUANTIZED, read_folder, same_bytes, tensors_of, write_folder

SPARSE = find_weight_map("deepseek_v32").plain


def quantized_weights(family, layers=3):
    return {f"model.layers.{layer}.{module}.weight" for layer in range(layers) for module in QUANTIZED[family]}


@pytest.mark.parametrize("family", QUANTIZED)
def test_blocks_have_the_bytes_of_quantize_block_and_the_rest_is_untouched(tmp_path, family):
    tensors = tensors_of(family)
    source = write_folder(tmp_path / "plain", tensors)
    recipe = to_fp8("block", [128, 128], plain=find_weight_map(family).plain)
    report = rewrite_folder(recipe, source, tmp_path / "fp8")
    assert report.is_complete and report.shards_written == 3
    expected = {}
    for name, tensor in tensors.items():
        if name in quantized_weights(family):
            expected[name], expected[f"{name}_scale_inv"] = quantize_block(tensor)
        else:
            expected[name] = tensor
    written = read_folder(tmp_path / "fp8")
    assert written.keys() == expected.keys()
    assert [name for name in expected if not same_bytes(written[name], expected[name])] == []
    assert (tmp_path / "fp8" / "tokenizer.json").read_text() == "{}"


def test_a_push_gives_the_bytes_of_the_offline_conversion(tmp_path):
    tensors = tensors_of("deepseek_v32")
    source = write_folder(tmp_path / "plain", tensors)
    recipes = {
        "block": to_fp8(plain=SPARSE),
        "ue8m0": to_fp8("block", [64, 32], "ue8m0", plain=SPARSE),
        "channel": to_fp8("channel", plain=SPARSE),
        "tensor": to_fp8("tensor", plain=SPARSE),
        "int4": to_int4(plain=SPARSE),
        "asymmetric": to_int4(16, is_symmetric=False, plain=SPARSE),
    }
    for name, recipe in recipes.items():
        rewrite_folder(recipe, source, tmp_path / name, workers=2)
        written = read_folder(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        asked = read_quantization(config)
        chosen = quantized_names(stored_codes(str(tmp_path / name)), asked.format)
        asked.check_names(chosen)
        quantizer = Quantizer(asked.format, chosen, known_names=tensors.keys())
        pushed = dict(pair for item in tensors.items() for pair in quantizer.quantize(*item))
        assert pushed.keys() == written.keys()
        assert [key for key in pushed if not same_bytes(pushed[key], written[key])] == [], name


def test_stacked_experts_get_tensors_of_their_own(tmp_path):
    stacks = {
        "m.experts.gate_up_proj": torch.randn(3, 256, 128).to(torch.bfloat16),
        "m.experts.down_proj": torch.randn(3, 128, 128).to(torch.bfloat16),
        "model.visual.patch_embed.proj.weight": torch.randn(8, 3, 2, 4, 4).to(torch.bfloat16),
        "vision_tower.layers.0.attention.q_proj.weight": torch.randn(128, 128).to(torch.bfloat16),
        "multi_modal_projector.linear_1.weight": torch.randn(128, 128).to(torch.bfloat16),
    }
    source = write_folder(tmp_path / "plain", stacks, shards=1)
    beside = PlainWeights(apart=(r"model\.visual\..+", r"(vision_tower|multi_modal_projector)\..+"))
    rewrite_folder(to_fp8("block", [128, 128], plain=beside), source, tmp_path / "fp8")
    parts = dict(by_expert(stacks))
    recipe = {name: quantize_block(tensor) for name, tensor in parts.items() if "experts" in name}
    expected = {name: quantized for name, (quantized, _) in recipe.items()}
    expected |= {f"{name}_scale_inv": scale for name, (_, scale) in recipe.items()}
    expected |= {name: tensor for name, tensor in parts.items() if "experts" not in name}
    written = read_folder(tmp_path / "fp8")
    assert written.keys() == expected.keys()
    assert [name for name in expected if not same_bytes(written[name], expected[name])] == []
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    # By both names: the folder's, and the one under which GLM's engine would quantize its tower.
    plain = ["model.visual.patch_embed.proj", "multi_modal_projector", "multi_modal_projector.linear_1"]
    assert config["modules_to_not_convert"] == [
        *plain,
        *("vision_tower", "vision_tower.layers.0.attention.q_proj", "visual"),
    ]


def test_tensors_that_do_not_fit_a_chunk_are_converted_in_runs_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("slime.ext.low_precision.folders.tensor_file.CHUNK_BYTES", {"cpu": 5000})
    weight = torch.randn(333, 200).to(torch.bfloat16)
    source = write_folder(tmp_path / "plain", {"model.layers.0.mlp.up_proj.weight": weight}, shards=1)
    for recipe, quantize in (
        (to_fp8("block", [32, 64]), lambda w: quantize_block(w, (32, 64))),
        (to_fp8("channel"), quantize_channel),
        (to_fp8("tensor"), quantize_tensor),
    ):
        strategy = recipe.settings["strategy"]
        rewrite_folder(recipe, source, tmp_path / strategy)
        written = read_folder(tmp_path / strategy)
        quantized, scale = quantize(weight)
        assert same_bytes(written.pop("model.layers.0.mlp.up_proj.weight"), quantized)
        assert same_bytes(*written.values(), scale)


def test_the_config_says_how_and_what_is_plain(tmp_path):
    source = write_folder(tmp_path / "plain", tensors_of("deepseek_v32"), config={"vocab_size": 256})
    rewrite_folder(to_fp8("block", [64, 128], "ue8m0", plain=SPARSE), source, tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config.pop("vocab_size") == 256
    quantization = config["quantization_config"]
    plain = quantization.pop("modules_to_not_convert")
    assert quantization == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [64, 128],
        "scale_fmt": "ue8m0",
    }
    per_layer = [
        f"model.layers.{layer}.{name}" for layer in range(3) for name in ("mlp.gate", "self_attn.indexer.weights_proj")
    ]
    of_mtp = [f"model.layers.2.{name}" for name in ("embed_tokens", "eh_proj", "shared_head.head")]
    assert plain == sorted(["lm_head", "model.embed_tokens", *per_layer, *of_mtp])


def test_integers_leave_out_what_the_rules_name_and_what_engines_absorb(tmp_path):
    tensors = tensors_of("deepseek_v32", layers=1)
    source = write_folder(tmp_path / "plain", tensors, shards=1)
    at = "model.layers.0"
    rules = [r"re:.*\.experts\.1\.", f"{at}.self_attn.indexer"]
    rewrite_folder(to_int4(32, ignore_rules=rules, plain=SPARSE), source, tmp_path / "int4")
    packed = {name for name in read_folder(tmp_path / "int4") if name.endswith("_packed")}
    modules = ("self_attn.q_b_proj", "self_attn.o_proj", *(f"mlp.experts.0.{n}_proj" for n in ("gate", "up", "down")))
    assert packed == {f"{at}.{name}.weight_packed" for name in modules}
    ignored = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]["ignore"]
    assert [rule for rule in ignored if rule.startswith("re:")] == [rules[0], *PLAIN_IN_INT4]
    plain = {"lm_head", "model.embed_tokens", f"{at}.mlp.gate", f"{at}.self_attn.indexer.weights_proj"}
    of_mtp = {f"{at}.{name}" for name in ("embed_tokens", "eh_proj", "shared_head.head")}
    by_rule = {f"{at}.self_attn.indexer.{name}" for name in ("wk", "wq_b")}
    assert {rule for rule in ignored if not rule.startswith("re:")} == plain | of_mtp | by_rule


def test_one_scale_per_tensor_is_not_for_what_the_engine_joins(tmp_path):
    source = write_folder(tmp_path / "plain", tensors_of("deepseek_v32", layers=1), shards=1)
    rewrite_folder(to_fp8("tensor", plain=SPARSE), source, tmp_path / "fp8")
    scaled = {name for name in read_folder(tmp_path / "fp8") if name.endswith("_scale")}
    joined = ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"]
    modules = [name for name in QUANTIZED["deepseek_v32"] if name not in joined]
    assert scaled == {f"model.layers.0.{name}.weight_scale" for name in modules}
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    plain = {f"model.layers.0.{name}" for name in [*joined, "self_attn.fused_qkv_a_proj_with_mqa"]}
    assert plain < set(config["modules_to_not_convert"])
    assert config["weight_block_size"] is None


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    weight = torch.zeros(256, 256)
    weight[200, 3] = float("nan")
    source = write_folder(tmp_path / "plain", {"model.layers.0.mlp.up_proj.weight": weight}, shards=1)
    with pytest.raises(DataError, match=r"model\.layers\.0\.mlp\.up_proj\.weight has NaN"):
        rewrite_folder(to_fp8(), source, tmp_path / "fp8")
    assert not (tmp_path / "fp8" / "config.json").exists()


def test_what_is_quantized_already_is_refused_whatever_the_strategy(tmp_path):
    source = write_folder(tmp_path / "plain", tensors_of("qwen3"))
    rewrite_folder(to_fp8(), source, tmp_path / "fp8")
    for recipe in (to_fp8(), to_fp8("channel"), to_fp8("tensor"), to_int4()):
        with pytest.raises(ConfigError, match=r"is quantized already \(fp8\).*fp8_cast_bf16"):
            rewrite_folder(recipe, tmp_path / "fp8", tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("block", [128]), "--block-size is 128; give rows and columns"),
        (("block", [0, 128]), "--block-size is 0 128"),
        (("block", [128, 100]), "each one of 16, 32, 64, 128, 256, 512"),
        (("block", []), "--block-size is ;"),
        (("channel", [128, 128]), "--block-size is for --strategy block"),
        (("tensor", None, "ue8m0"), "--scale-fmt is for --strategy block"),
        (("row",), "--strategy is 'row'; use one of block, channel, tensor"),
        (("block", None, "e8"), "--scale-fmt is 'e8'"),
    ],
)
def test_flags_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        to_fp8(*arguments)


def test_groups_that_do_not_divide_a_weight_are_refused_before_anything_is_written(tmp_path):
    source = write_folder(tmp_path / "plain", tensors_of("qwen3"))
    with pytest.raises(ConfigError, match="has 160 columns, which is not a multiple of the group size 64"):
        rewrite_folder(to_int4(64), source, tmp_path / "int4")
    assert not (tmp_path / "int4").exists()
    with pytest.raises(ConfigError, match="--group-size is 12"):
        to_int4(12)
    with pytest.raises(ConfigError, match=r"--ignore-rules 're:\(' is no regular expression"):
        to_int4(32, ignore_rules=["re:("])
