"""Every field of SGLang's requests through the installed router: what arrives, and what slime expects to arrive."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentParser, Namespace

import pytest
import requests

from slime.backends.sglang_utils import cpu_shim
from slime.backends.sglang_utils.router_process import register_worker, start_router
from slime.backends.sglang_utils.server_control import ServerControl
from slime.rollout.engine_client import ROUTER_KEEPS_FIELDS, ROUTER_KEEPS_SAMPLING_PARAMS
from slime.utils.net import get_free_port
from tests.scripted_engine.server import ScriptedEngine

pytestmark = [pytest.mark.slow]

VALUES = [1, 0.5, True, "a", ["a"], [1], {"a": 1}, {"1": 1.0}]
"""Values of all types, because the router checks types; a field is kept if any of them passes."""


@pytest.fixture(scope="module")
def is_kept():
    """Whether a field of the request (or of its sampling parameters) reaches a worker."""
    engine = ScriptedEngine()
    engine.start()
    args = Namespace(sglang_router_request_timeout_secs=60, router_policy="round_robin", router_log_level="warn")
    router = start_router(args, host="127.0.0.1", port=get_free_port(26900), prometheus_port=get_free_port(27900))
    register_worker(ServerControl(router.url), engine.url, worker_type="regular")
    session = requests.Session()
    session.trust_env = False

    def ask(name: str, *, nested: bool) -> bool:
        for value in VALUES:
            body: dict = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
            (body["sampling_params"] if nested else body)[name] = value
            engine.payloads.clear()
            response = session.post(f"{router.url}/generate", json=body, timeout=20)
            if response.ok and engine.payloads:
                received = engine.payloads[-1]["sampling_params"] if nested else engine.payloads[-1]
                if name in received and received[name] == value:
                    return True
        return False

    yield ask
    session.close()
    router.stop()
    engine.stop()


def test_every_field_of_a_request_is_kept_or_known_to_be_lost(is_kept):
    cpu_shim.install()
    from sglang.srt.managers.io_struct import GenerateReqInput

    names = {field.name for field in dataclasses.fields(GenerateReqInput)} - {"sampling_params"}
    assert len(names) > 40
    assert {name for name in names if is_kept(name, nested=False)} == ROUTER_KEEPS_FIELDS - {"sampling_params"}


def test_every_sampling_parameter_is_kept_or_known_to_be_lost(is_kept):
    cpu_shim.install()
    from sglang.srt.sampling.sampling_params import SamplingParams

    names = set(getattr(SamplingParams, "__struct_fields__", None) or SamplingParams.__annotations__)
    assert len(names) > 20
    assert {name for name in names if is_kept(name, nested=True)} == ROUTER_KEEPS_SAMPLING_PARAMS


def test_every_flag_of_the_router_has_a_prefixed_one_and_reaches_it():
    from sglang_router.router_args import RouterArgs

    from slime.backends.sglang_utils.arguments import add_sglang_arguments
    from slime.backends.sglang_utils.router_process import build_router_args

    plain, ours = ArgumentParser(), ArgumentParser(allow_abbrev=False)
    RouterArgs.add_cli_args(plain, use_router_prefix=False, exclude_host_port=True)
    add_sglang_arguments(ours)
    wanted = {f"--router-{flag.lstrip('-')}" for a in plain._actions for flag in a.option_strings} - {
        "--router-h", "--router-help",
    }  # fmt: skip
    assert len(wanted) > 50
    assert wanted <= set(ours._option_string_actions)
    line = "--router-policy cache_aware --router-cache-threshold 0.25 --router-max-concurrent-requests 7"
    built = build_router_args(
        ours.parse_args(line.split()), host="h", port=1, prometheus_port=2, pd_disaggregation=False
    )
    assert (built["policy"], built["cache_threshold"], built["max_concurrent_requests"]) == ("cache_aware", 0.25, 7)
