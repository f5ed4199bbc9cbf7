"""Every field of megatron-core's configs is a flag or has a reason not to be; values follow the field's annotation."""

from __future__ import annotations

import argparse
import pickle

import pytest

from slime.backends.megatron_utils.flags.config_flags import (
    CONFIG_CLASSES,
    DEFAULTS,
    EXTRA_SPELLINGS,
    FLAG_NAMES,
    NEGATIVE_SPELLINGS,
    NOT_FLAGS,
    add_config_flags,
    attribute_of,
    config_arguments,
    config_fields,
    layer_pattern,
    value_kind,
)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(allow_abbrev=False)
    add_config_flags(result)
    return result


FIELDS = {field.name for config_class in CONFIG_CLASSES for field, _ in config_fields(config_class)}


def test_the_tables_name_only_fields_that_exist() -> None:
    attributes = {attribute_of(name) for name in FIELDS}
    assert FLAG_NAMES.keys() <= FIELDS
    assert NOT_FLAGS.keys() <= FIELDS
    assert DEFAULTS.keys() | EXTRA_SPELLINGS.keys() | NEGATIVE_SPELLINGS.keys() <= attributes


def test_a_flag_that_is_on_the_parser_already_is_left_alone() -> None:
    shared = argparse.ArgumentParser(allow_abbrev=False)
    shared.add_argument("--num-layers", default="mine")
    add_config_flags(shared)
    assert shared.parse_args([]).num_layers == "mine"


@pytest.mark.parametrize(
    ("flags", "attribute", "value"),
    [
        ("--num-experts 8", "num_experts", 8),
        ("--norm-epsilon 1e-6", "norm_epsilon", 1e-6),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--no-rope-fusion", "apply_rope_fusion", False),
        ("--no-masked-softmax-fusion", "masked_softmax_fusion", False),
        ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
        ("--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_loss_and_grad", False),
        ("--accumulate-allreduce-grads-in-fp32", "accumulate_allreduce_grads_in_fp32", True),
        ("--decoder-last-pipeline-num-layers 13", "decoder_last_pipeline_num_layers", 13),
        ("--attention-backend flash", "attention_backend", "flash"),
        ("--fp8-format e4m3", "fp8", "e4m3"),
        ("--moe-layer-freq [0]*1+[1]*2", "moe_layer_freq", [0, 1, 1]),
        ("--moe-layer-freq 2", "moe_layer_freq", 2),
        ("--moe-router-load-balancing-type seq_aux_loss", "moe_router_load_balancing_type", "seq_aux_loss"),
        ("--moe-router-load-balancing-type aux_loss none", "moe_router_load_balancing_type", ["aux_loss", "none"]),
        ("--moe-aux-loss-coeff 0", "moe_aux_loss_coeff", 0.0),
        ("--recompute-modules moe mlp", "recompute_modules", ["moe", "mlp"]),
        ("--window-size 128,0", "window_size", (128, 0)),
        ("--apply-layernorm-1p", "apply_layernorm_1p", True),
        ("--overlap-grad-reduce", "overlap_grad_reduce", True),
        ("--swiglu --no-swiglu", "swiglu", False),
    ],
)
def test_a_value_is_read_as_its_field_wants_it(flags: str, attribute: str, value: object) -> None:
    assert vars(parser().parse_args(flags.split()))[attribute] == value


def test_a_config_gets_the_values_under_its_own_field_names() -> None:
    transformer_config = CONFIG_CLASSES[0]
    values = config_arguments(transformer_config, {"num_experts": 4, "attention_backend": "unfused", "lr": 1.0})
    assert values["num_moe_experts"] == 4 and set(values) == {"num_moe_experts", "attention_backend"}
    assert values["attention_backend"].name == "unfused"


def test_args_hold_nothing_that_needs_megatron_core_to_be_unpickled() -> None:
    assert b"megatron" not in pickle.dumps(parser().parse_args(["--attention-backend", "flash"]))


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("[0]*3+[1]*2", [0, 0, 0, 1, 1]), ("([0]+[1]*2)*2", [0, 1, 1, 0, 1, 1]), ("[0, 1]", [0, 1])],
)
def test_a_layer_pattern_is_read_like_python(text: str, value: object) -> None:
    assert layer_pattern(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "__import__('os')",
        "[x for x in [1]]",
        "[1]*10**9",
        "[1]*1000000",
        "[1.5]",
        "[True]",
        "1+[1]",
        "[1]*[1]",
        "a",
    ],
)
def test_a_layer_pattern_executes_nothing_and_stays_small(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a layer pattern"):
        layer_pattern(text)


def test_an_unknown_kind_of_field_is_noticed() -> None:
    with pytest.raises(TypeError, match="NOT_FLAGS"):
        value_kind(dict[str, int])
