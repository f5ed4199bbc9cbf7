"""Flags generated from the installed SGLang.  Building the parser imports SGLang, once for this file."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.sglang_utils.arguments import (
    SLIME_DECIDES,
    add_sglang_arguments,
    check_sglang_arguments,
    validate_sglang_arguments,
)
from slime.utils.errors import ConfigError

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def parser():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rollout-num-gpus", type=int, default=64)
    parser.add_argument("--rollout-num-gpus-per-engine", type=int, default=1)
    parser.add_argument("--num-gpus-per-node", type=int, default=8)
    parser.add_argument("--hf-checkpoint", default="model")
    parser.add_argument("--rollout-external-engine-addrs", nargs="+", default=None)
    parser.set_defaults(
        use_rollout_routing_replay=False, rollout_external=False, rollout_top_p=1.0, eval_in_background=False,
        offload_train_if_needed=False, debug_rollout_only=False, debug_train_only=False, push_sends_model=True,
        weight_loaders=[], fp16=False, bf16=True, fp32=False,
    )  # fmt: skip
    add_sglang_arguments(parser)
    return parser


def parse(parser, line: str) -> argparse.Namespace:
    args = parser.parse_args(line.split())
    validate_sglang_arguments(args)
    return args


def test_every_field_of_server_args_has_a_prefixed_flag_or_is_slimes(parser):
    import dataclasses

    from sglang.srt.server_args import ServerArgs

    attributes = {action.dest for action in parser._actions}
    plain = argparse.ArgumentParser()
    ServerArgs.add_cli_args(plain)
    with_flag = {action.dest for action in plain._actions} & {field.name for field in dataclasses.fields(ServerArgs)}
    assert len(with_flag) > 300
    assert {f"sglang_{name}" for name in with_flag - SLIME_DECIDES.keys()} <= attributes
    assert not {f"sglang_{name}" for name in SLIME_DECIDES.keys() - {"config"}} & attributes


def test_defaults_of_the_router_and_of_slimes_own_flags(parser):
    args = parse(parser, "")
    assert (args.router_log_level, args.router_balance_abs_threshold, args.router_balance_rel_threshold) == (
        "warn",
        10,
        1.2,
    )
    assert (args.sglang_router_ip, args.sglang_router_port) == (None, None)
    assert (args.sglang_router_request_timeout_secs, args.sglang_server_concurrency) == (14400, 512)
    assert (args.sglang_config, args.prefill_num_servers) == (None, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--sglang-dp-size 0", "--sglang-dp-size is 0"),
        ("--rollout-num-gpus-per-engine 0", "--rollout-num-gpus-per-engine is 0"),
        ("--router-dp-aware", "--router-dp-aware makes the router list each"),
        ("--prefill-num-servers 1 --rollout-external-engine-addrs a:1", "lays out the engines alone"),
    ],
)
def test_what_cannot_work_is_refused_with_its_flags(parser, line, message):
    with pytest.raises(ConfigError, match=message):
        check_sglang_arguments(parser.parse_args(line.split()))


def test_ipv6_routers_are_bracketed(parser):
    assert parse(parser, "--sglang-router-ip ::1 --sglang-router-port 3000").sglang_router_ip == "[::1]"


def test_a_published_form_that_engines_would_repack_is_refused_before_anything_starts(parser, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    scale = torch.ones(32, 1).to(torch.float8_e8m0fnu)
    expert = {"experts.0.w1.weight": torch.ones(32, 16).to(torch.int8), "experts.0.w1.scale": scale}
    save_file(expert, tmp_path / "model.safetensors")
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", "quantization_config": blocks}))
    line = f"--rollout-num-gpus 1 --hf-checkpoint {tmp_path}"
    kept = "--sglang-fp8-gemm-backend triton"
    with pytest.raises(ConfigError, match=r"^--sglang-fp8-gemm-backend .*'auto', with which SGLang repacks one-byte"):
        parse(parser, line)
    with pytest.raises(ConfigError, match=r"^--sglang-moe-runner-backend .*'marlin', with which .* FP4 experts"):
        parse(parser, f"{line} {kept} --sglang-moe-runner-backend marlin")
    assert parse(parser, f"{line} {kept}").sglang_fp8_gemm_runner_backend == "triton"
