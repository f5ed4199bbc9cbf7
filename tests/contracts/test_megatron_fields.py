"""Every field of megatron-core's configs that is a flag has a reader in this trainer, or says that it has none."""

from __future__ import annotations

import argparse
import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest

from slime.backends.megatron_utils.flags.config_flags import CONFIG_CLASSES, NOT_FLAGS, attribute_of, config_fields
from slime.backends.megatron_utils.flags.field_table import WITHOUT_EFFECT, reset_what_has_no_effect
from slime.backends.megatron_utils.flags.hf_config_check import FIXED_FLAGS, MODEL_FLAGS
from slime.backends.megatron_utils.flags.own_flags import add_own_flags
from slime.compose import flag_groups
from slime.flags.parse import build_parser
from slime.flags.words import refuse_unknown
from slime.utils.errors import ConfigError

FIELDS = {
    field.name
    for config_class in CONFIG_CLASSES
    for field, _ in config_fields(config_class)
    if field.name not in NOT_FLAGS
}


OF_THE_TRAINER = """
    initialize model_provider layers.value_head layers.attention layers.norm
    layers.layer_specs layers.latent_attention layers.rotary
    layers.experts layers.token_dispatcher flags.resolve_arguments flags.check_arguments flags.config_builders
    adam model train_step checkpoint
"""
OF_MEGATRON = """
    config_logger tensor_parallel.layers pipeline_parallel.schedules pipeline_parallel.p2p_communication
    transformer.transformer_block transformer.transformer_layer transformer.attention transformer.mlp
    models.common.embeddings.language_model_embedding models.gpt.gpt_model transformer.moe.moe_layer
    transformer.moe.router transformer.moe.token_dispatcher distributed.finalize_model_grads optimizer
    distributed.distributed_data_parallel distributed.param_and_grad_buffer
"""
READ_BY_THE_CONFIG = {"embedding_init_method_std", "moe_router_topk_limited_devices"}
READERS = [
    *(f"slime.backends.megatron_utils.{name}" for name in OF_THE_TRAINER.split()),
    *("slime.ext.low_precision.flags", "slime.ext.low_precision.fp8_linear", "slime.ext.small_adam.adam"),
    *("slime_plugins.models.glm5.family", "slime_plugins.models.qwen3_next.layers"),
]
READERS += [f"megatron.core.{name}" for name in OF_MEGATRON.split()]
"""The modules of the trainer, and the megatron-core modules it uses, that read its configs."""


@cache
def names_read_by(module: str) -> set[str]:
    """Attributes that a module reads, and strings with which it may read one."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"there is no {module}"
    nodes = list(ast.walk(ast.parse(Path(spec.origin).read_text())))
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return attributes | {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def test_every_field_has_a_reader_or_is_reset():
    read = set.union(*map(names_read_by, READERS))
    unread = {name for name in FIELDS if not {name, attribute_of(name)} & read}
    assert unread - {*WITHOUT_EFFECT, *READ_BY_THE_CONFIG} == set(), "a new field of megatron-core: who reads it here?"
    assert set(WITHOUT_EFFECT) <= FIELDS


SAME_FUNCTION = {
    # fields of a model's config that change its layout, speed, rounding, or noise and losses of training
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("sequence_parallel", "context_parallel_size", "hierarchical_context_parallel_sizes"),
    *("expert_model_parallel_size", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *(
        "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split",
        "microbatch_group_size_per_vp_stage",
    ),
    *("account_for_loss_in_pipeline_split", "overlap_p2p_comm", "batch_p2p_sync", "overlap_p2p_comm_warmup_flush"),
    *("perform_initialization", "use_cpu_initialization", "init_method_std", "embedding_init_method_std"),
    *("fp16", "bf16", "enable_autocast", "fp32_residual_connection", "deterministic_mode", "test_mode"),
    *("attention_backend", "bias_activation_fusion", "bias_dropout_fusion", "transformer_impl", "config_logger_dir"),
    *("activation_func_fp8_input_store", "fp8", "fp8_recipe", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "clone_scatter_output_in_embedding"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("distribute_saved_activations", "hidden_dropout", "attention_dropout", "qk_clip", "log_max_attention_logit"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff"),
    *("moe_input_jitter_eps", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
    *("moe_token_drop_policy", "moe_token_dispatcher_type", "moe_enable_deepep", "moe_flex_dispatcher_backend"),
    *("moe_deepep_num_sms", "moe_hybridep_num_sms", "moe_shared_expert_overlap"),
    "mrope_section",  # set only by config.json
}


def test_every_field_that_changes_what_a_model_computes_is_held_against_config_json():
    compared = {name for name in FIELDS if attribute_of(name) in MODEL_FLAGS | FIXED_FLAGS}
    fields = {field.name for config_class in CONFIG_CLASSES[:2] for field, _ in config_fields(config_class)}
    assert fields - compared - SAME_FUNCTION - {*WITHOUT_EFFECT, *NOT_FLAGS} == set()
    assert SAME_FUNCTION <= FIELDS - compared


def test_every_flag_that_is_no_field_has_a_reader():
    parser = argparse.ArgumentParser(add_help=False)
    add_own_flags(parser)
    read = set.union(*map(names_read_by, READERS))
    assert {action.dest for action in parser._actions} - read == {"ckpt_format"}  # it has one choice


VALUES = {
    # the argument of a flag that takes a value; none for a switch
    "fp8": "e4m3",
    "fp8_recipe": "tensorwise",
    "fp8_amax_compute_algo": "max",
    "fp4_recipe": "custom",
    "cross_entropy_fusion_impl": "te",
    "cp_comm_type": "p2p",
    "tp_comm_bootstrap_backend": "mpi",
    "main_grads_dtype": "bf16",
    "main_params_dtype": "fp16",
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}


@pytest.fixture(scope="module")
def parser():
    return build_parser(with_engine_flags=False, groups=flag_groups())


def words_that_set(parser, name):
    """The flag of a field with a value that differs from its default."""
    attribute = attribute_of(name)
    flags = [action for action in parser._actions if action.dest == attribute]
    for action in flags:
        if action.nargs == 0 and action.const is not parser.get_default(attribute):
            return [action.option_strings[0]]
    (action,) = flags
    if action.choices:
        return [action.option_strings[0], next(c for c in action.choices if c != action.default)]
    return [action.option_strings[0], VALUES.get(name, "7")]


def test_a_field_that_is_no_flag_is_refused_with_the_reason(parser):
    words = ["--no-fp8-wgrad", "--moe-latent-size", "8"]
    with pytest.raises(ConfigError) as caught:
        refuse_unknown(parser, words, parser.parse_known_args(words)[1])
    assert str(caught.value).splitlines() == [
        "--no-fp8-wgrad is not a flag: it belongs to TransformerEngine's layers, which slime does not have. Leave it "
        "out.",
        "--moe-latent-size is not a flag: experts work on the whole hidden size. Leave it out.",
    ]


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_a_flag_without_effect_is_reset_and_says_so_once(parser, name, caplog):
    words = words_that_set(parser, name)
    args = parser.parse_args(words)
    with caplog.at_level("INFO"):
        derived = reset_what_has_no_effect(vars(args))
    assert derived == {attribute_of(name): parser.get_default(attribute_of(name))}
    assert [record for record in caplog.records if words[0] in record.getMessage()] == caplog.records
    assert len(caplog.records) == 1


def test_defaults_are_neither_refused_nor_reset(parser):
    args = parser.parse_args([])
    assert reset_what_has_no_effect(vars(args)) == {}
