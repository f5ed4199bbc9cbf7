from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import replace

import pytest

from slime.backends.sglang_utils.server_args import EnginePlace, build_server_args, keep_known

PLACE = EnginePlace(
    rank=3,
    num_gpus_per_engine=2,
    base_gpu_id=4,
    host="10.0.0.1",
    port=15000,
    nccl_port=15001,
    dist_init_addr="10.0.0.1:15002",
)


def flags(**given) -> Namespace:
    defaults = {
        "seed": 100,
        "num_gpus_per_node": 8,
        "offload_rollout": True,
        "sglang_pp_size": 1,
        "sglang_dp_size": 1,
        "sglang_ep_size": 1,
        "sglang_data_parallel_size": 1,
        "sglang_router_ip": "1.2.3.4",
        "sglang_server_concurrency": 512,
        "sglang_mem_fraction_static": None,
        "sglang_enable_hierarchical_cache": True,
        "sglang_cuda_graph_backend_prefill": None,
        "sglang_tp_size": 2,
        "weight_loaders": ["own.load"],
        "engine_settings": {},
        "use_rollout_routing_replay": False,
        "bf16": False,
        "fp16": False,
        "fp32": False,
    }
    return Namespace(**defaults | given)


def build(args: Namespace | None = None, place: EnginePlace = PLACE, on_cpu: bool = False, **overrides):
    return build_server_args(args or flags(), place, model_path="/hf", overrides=overrides, on_cpu=on_cpu)


def test_flags_fill_the_rest_and_router_flags_stay_out():
    built = build(flags(sglang_context_length=4096))
    assert built["context_length"] == 4096
    assert not {"router_ip", "server_concurrency", "data_parallel_size"} & set(built)


def test_weight_loaders_of_a_group_stand_beside_those_of_the_flags():
    built = build(flags(sglang_custom_weight_loader=["a.load"]), custom_weight_loader=["b.load"])
    assert built["custom_weight_loader"] == ["a.load", "b.load", "own.load"]


def test_prefill_and_decode_engines_get_their_roles():
    prefill = build(place=replace(PLACE, worker_type="prefill", disaggregation_bootstrap_port=9))
    assert prefill["disaggregation_mode"] == "prefill"
    assert prefill["load_balance_method"] == "follow_bootstrap_room"
    assert prefill["disaggregation_bootstrap_port"] == 9
    assert prefill["enable_hierarchical_cache"] is True
    decode = build(place=replace(PLACE, worker_type="decode"))
    assert decode["disaggregation_mode"] == "decode"
    assert "enable_hierarchical_cache" not in decode
    assert build(place=replace(PLACE, worker_type="encoder"))["encoder_only"] is True


def test_prefill_graphs_are_off_while_memory_can_be_released():
    assert build()["cuda_graph_backend_prefill"] == "disabled"
    assert build(flags(offload_rollout=False))["cuda_graph_backend_prefill"] is None
    assert build(flags(sglang_cuda_graph_backend_prefill="full"))["cuda_graph_backend_prefill"] == "full"


@pytest.mark.parametrize(
    ("given", "on_cpu", "dtype"),
    [
        ({}, False, None),
        ({"bf16": True}, False, "bfloat16"),
        ({"fp16": True}, False, "float16"),
        ({"fp32": True}, False, "float32"),
        ({}, True, "float32"),
        ({"bf16": True}, True, "bfloat16"),
        ({"bf16": True, "sglang_dtype": "float32"}, True, "float32"),
        ({"bf16": True, "sglang_dtype": "auto"}, True, "bfloat16"),
    ],
)
def test_the_engine_computes_in_the_trainers_precision(given, on_cpu, dtype):
    assert build(flags(**given), on_cpu=on_cpu).get("dtype") == dtype


def test_fields_that_the_installed_version_lacks_are_dropped_and_named(caplog):
    with caplog.at_level(logging.INFO):
        assert keep_known({"a": 1, "b": 2}, {"a"}) == {"a": 1}
    assert "left out: b" in caplog.text


def test_an_override_under_an_older_name_reaches_the_field_that_took_its_place():
    given = {"cuda_graph_max_bs_decode": 8, "cuda_graph_max_bs": 12}  # the flag's, then the group's override
    assert keep_known(given, {"cuda_graph_max_bs_decode"}) == {"cuda_graph_max_bs_decode": 12}
    assert keep_known({"cuda_graph_max_bs": 12}, {"cuda_graph_max_bs"}) == {"cuda_graph_max_bs": 12}


def test_a_checkpoint_drafts_with_its_own_mtp_layers_unless_another_is_named():
    assert build(flags(sglang_speculative_algorithm="EAGLE"))["speculative_draft_model_path"] == "/hf"
    named = flags(sglang_speculative_algorithm="EAGLE", sglang_speculative_draft_model_path="/draft")
    assert build(named)["speculative_draft_model_path"] == "/draft"
    assert "speculative_draft_model_path" not in build(flags(sglang_speculative_algorithm="NGRAM"))
    assert "speculative_draft_model_path" not in build()


def test_an_extension_decides_settings_that_no_flag_changes():
    args = flags(engine_settings={"enable_lora": True, "max_lora_rank": 8}, sglang_max_lora_rank=1)
    built = build(args)
    assert (built["enable_lora"], built["max_lora_rank"]) == (True, 8)


@pytest.mark.parametrize("processor", [False, True])
def test_a_folder_with_a_tower_and_no_processor_is_served_as_text(tmp_path, processor):
    (tmp_path / "config.json").write_text('{"model_type": "mistral3", "vision_config": {"hidden_size": 8}}')
    if processor:
        (tmp_path / "preprocessor_config.json").write_text("{}")
    built = build_server_args(flags(), PLACE, model_path=str(tmp_path), overrides={}, on_cpu=False)
    assert built.get("enable_multimodal") is (None if processor else False)
