"""Tools of a real MCP server made with the package: as a process, and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
import threading
from argparse import Namespace
from pathlib import Path

import psutil
import pytest

from slime.ext.environments.multi_turn import generate
from slime.ext.mcp import server as mcp_server
from slime.ext.mcp.flags import check_servers, derive_servers
from slime.rollout.tools import TurnsConfig, toolbox
from slime.utils.errors import ConfigError
from slime.utils.types import Sample
from tests.eventually import wait_until

WAREHOUSE = Path(__file__).with_name("warehouse.py")
COMMAND = f"mcp:env PYTHONPATH={shlex.quote(os.pathsep.join(sys.path))} {sys.executable} {WAREHOUSE}"
READERS = {"mcp:": "slime.ext.mcp.server.read_tools"}

pytest.importorskip("mcp", reason="the extra `mcp` is not installed, nor is .venv/extras")


@pytest.fixture(scope="module", autouse=True)
def nothing_left():
    yield
    mcp_server.stop_servers()


def tools_of(*words: str):
    return toolbox(TurnsConfig.of(Namespace(rollout_tools=[*words], tool_readers=READERS)))


def called(tools, *calls, timeout_s=20.0):
    async def all_at_once():
        return await asyncio.gather(*(tools.call(name, given, timeout_s=timeout_s) for name, given in calls))

    return asyncio.run(all_at_once())


def test_a_policy_is_offered_the_tools_and_reads_their_answers(talk, ask):
    call = {"name": "stock", "arguments": {"article": "nail", "function": "eye"}}

    def policy(prompt):
        return "Four." if "4 nail by eye" in prompt else f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    args, _ = talk(policy, rollout_tools=[COMMAND], tool_readers=READERS)
    sample = asyncio.run(generate(args, ask("?"), {"max_new_tokens": 400}))
    assert sample.status is Sample.Status.COMPLETED and sample.metadata["round_number"] == 2
    assert sample.response.endswith("Four.<|im_end|>")
    described = toolbox(TurnsConfig.of(args)).schemas[0]["function"]
    assert described["name"] == "stock" and "how many of an article" in described["description"]
    assert described["parameters"]["required"] == ["article"]


def test_a_tool_that_fails_and_a_call_that_does_not_fit_are_answered_with_their_errors():
    failed, unfit = called(tools_of(COMMAND), ("stock", {"article": "air"}), ("stock", {"articles": 3}))
    assert failed.startswith("Error: RuntimeError: ") and "nobody stores air" in failed
    assert unfit.startswith("Error: ") and "article" in unfit


def test_calls_of_all_samples_run_at_the_same_time_in_one_process():
    met = called(tools_of(COMMAND), *(("meet", {"number": number}) for number in range(3)))
    assert [one.split()[0] for one in met] == ["0", "1", "2"] and len({one.split()[-1] for one in met}) == 1


def test_a_call_that_is_late_is_given_up_in_the_server_and_the_session_lives():
    tools = tools_of(COMMAND)
    [process] = called(tools, ("number", {}))
    [late] = called(tools, ("doze", {"name": "Ann"}), timeout_s=0.3)
    assert late == "Error: TimeoutError: no answer within 0.3 s (--turn-timeout-s)"
    wait_until(lambda: called(tools, ("who_gave_up", {})) == ["Ann"], "the server gives the call up", timeout_s=10)
    assert called(tools, ("who_gave_up", {}), ("number", {})) == ["Ann", process]


def test_a_server_that_dies_costs_the_calls_that_were_under_way_and_is_started_again():
    tools = tools_of(COMMAND)
    [before] = called(tools, ("number", {}))
    lost = called(tools, ("burn", {}), ("doze", {"name": "Bob"}))
    assert all(re.match("Error: .*[Cc]losed", one) for one in lost), lost
    [after] = called(tools, ("number", {}))
    assert after != before and int(after) > 0
    mcp_server.stop_servers()
    for process in (before, after):
        wait_until(lambda process=process: not psutil.pid_exists(int(process)), f"the end of process {process}")


def test_a_server_behind_http():
    import uvicorn

    from tests.ext.mcp.warehouse import server

    web = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), port=0, log_level="warning"))
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    wait_until(lambda: web.started, "the start of the server")
    port = web.servers[0].sockets[0].getsockname()[1]
    word = f"mcp:http://127.0.0.1:{port}/mcp"
    tools = tools_of(word)
    assert called(tools, ("stock", {"article": "screw"}), ("number", {})) == ["5 screw by count", str(os.getpid())]
    with pytest.raises(ConfigError, match="two tools 'stock'"):
        tools_of(word, "tests.ext.mcp.warehouse.stock")
    web.should_exit = True
    thread.join(20)
    [lost] = called(tools, ("number", {}))
    assert lost.startswith("Error: ")
    with pytest.raises(ConfigError, match=f"mcp:http://127.0.0.1:{port}/other: the server does not list its tools"):
        tools_of(f"mcp:http://127.0.0.1:{port}/other")


def test_what_is_no_server_is_refused():
    for word in ("mcp:/nowhere/server --all", "mcp:true"):
        with pytest.raises(ConfigError, match=f"{word}: the server does not list its tools"):
            tools_of(word)


def test_the_prefix_is_known_wherever_the_extension_is():
    args = Namespace(rollout_tools=[COMMAND], tool_readers={}, runs_here=True)
    derive_servers(args)
    assert args.tool_readers == READERS and list(check_servers(args)) == []
