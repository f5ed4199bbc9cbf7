"""Discovering external engines from what they report."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from slime.backends.sglang_utils.server_control import ServerControl
from slime.compose import flag_groups
from slime.ext.external_engines import discovery
from slime.ext.external_engines.adopt import _told_dtype
from slime.ext.external_engines.discovery import check_capabilities, describe, discover, normalise
from slime.ext.external_engines.flags import GROUP
from slime.flags.parse import build_parser
from slime.utils.errors import ConfigError
from slime.utils.net import get_free_port
from tests.scripted_engine.server import ScriptedEngine


@pytest.mark.parametrize("address", ["10.0.0.1", "https://host:1", "http://host:1/path", "host:port", ":3"])
def test_an_address_without_host_or_port_or_with_another_scheme_is_refused(address):
    with pytest.raises(ConfigError, match="host:port"):
        normalise(address)


def test_the_flags_of_a_run_ask_its_engines() -> None:
    args = build_parser(with_engine_flags=False, groups=flag_groups()).parse_args(
        ["--rollout-external-engine-addrs", "10.0.0.1"]
    )
    args.rollout_external, args.job_secret = True, None
    (derive,) = next(group for group in flag_groups() if group.derive == GROUP.derive).derive
    with pytest.raises(ConfigError, match="--rollout-external-engine-addrs.*'10.0.0.1'.*host:port"):
        derive(args)


@pytest.mark.parametrize(
    ("info", "worker_type", "num_gpus", "bootstrap_port"),
    [
        ({"tp_size": 4, "pp_size": 2}, "regular", 8, None),
        ({"tensor_parallel_size": 2}, "regular", 2, None),
        ({"tp_size": 2, "num_gpus": 16}, "regular", 16, None),
        ({"disaggregation_mode": "null", "disaggregation_bootstrap_port": 8998}, "regular", 1, None),
        ({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998}, "prefill", 1, 8998),
        ({"disaggregation_mode": "decode", "disaggregation_bootstrap_port": 8998}, "decode", 1, None),
        ({"encoder_only": True, "disaggregation_mode": "null"}, "encoder", 1, None),
    ],
)
def test_kind_and_size_follow_from_what_it_tells(info, worker_type, num_gpus, bootstrap_port):
    found = describe("http://e:1", info)
    assert (found.worker_type, found.num_gpus, found.disaggregation_bootstrap_port) == (
        worker_type,
        num_gpus,
        bootstrap_port,
    )


def test_every_engine_is_asked():
    with ScriptedEngine() as first, ScriptedEngine() as second:
        found = discover([f"{first.host}:{first.port}", second.url])
    assert [(info.url, info.worker_type, info.num_gpus) for info in found] == [
        (first.url, "regular", 1),
        (second.url, "regular", 1),
    ]


def test_an_engine_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(discovery, "INFO_TIMEOUT_S", 2.0)
    port = get_free_port(28900)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}, which does not tell what it is"):
        discover([f"127.0.0.1:{port}"])


def test_an_address_given_twice_is_refused():
    with pytest.raises(ConfigError, match="more than once"):
        discover(["h:1", "http://h:1"])


def flags(**given) -> Namespace:
    base = {"use_rollout_routing_replay": False, "sglang_enable_deterministic_inference": False, "hf_checkpoint": "/m"}
    base["rollout_top_p"] = 1.0
    return Namespace(**base | given)


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("use_rollout_routing_replay", "enable_return_routed_experts"),
        ("sglang_enable_deterministic_inference", "enable_deterministic_inference"),
    ],
)
def test_an_engine_without_what_the_run_needs_is_refused(flag, field):
    with pytest.raises(ConfigError, match=field.replace("_", "-")):
        check_capabilities(flags(**{flag: True}), describe("http://e:1", {}))
    check_capabilities(flags(**{flag: True}), describe("http://e:1", {field: True}))


def test_an_engine_without_the_plugin_is_told_what_to_do() -> None:
    with ScriptedEngine() as engine, pytest.raises(ConfigError, match=r"in which slime is installed"):
        discovery.check_returns_nuclei(ServerControl(engine.url), top_p=0.9)


@pytest.mark.parametrize(("answer", "dtype"), [("float32", "float32"), ("auto", "bfloat16")])
def test_the_dtype_is_what_it_tells_or_that_of_the_checkpoint_it_was_started_with(answer, dtype, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    info = describe("http://engine:1", {"dtype": answer, "model_path": str(tmp_path)})
    assert _told_dtype(info, "elsewhere") == dtype
