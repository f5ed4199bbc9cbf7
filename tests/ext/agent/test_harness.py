"""Harnesses: what they write and run, in a recording sandbox; and one real program in a real shell."""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib

import pytest

from slime.agent.adapters import OpenAIAdapter
from slime.agent.harness import BaseHarness, ClaudeCodeHarness, CodexHarness, HarnessContext
from slime.agent.harness.common import install_npm_cli, run_agent
from slime.agent.sandbox import LocalSandbox
from slime.utils.aiohttp_threaded import run_app_in_thread
from slime.utils.types import Sample
from tests.unit.talking_engine import TalkingEngine


class NoteTaking:
    """A sandbox where every command succeeds unless it contains ``fails``; returns plain tuples."""

    sandbox_id = "notes"

    def __init__(self, *fails):
        self.fails = list(fails)
        self.ran = []
        self.files = {}

    async def exec(self, cmd, *, user="root", env=None, timeout=120, check=False, idempotent=True):
        self.ran.append((user, cmd))
        failed = any(part in cmd for part in self.fails)
        if failed and not check:
            return (1, "", "")
        self.fails = [part for part in self.fails if part not in cmd]
        return (0, "0\n" if cmd.startswith("cat /tmp/slime-job") else "", "")

    async def write_file(self, path, content, *, user="root"):
        self.files[path] = content

    async def read_file(self, path, *, user="root"):
        return self.files[path]

    def script(self, tag):
        """The script of the job with this tag."""
        (found,) = [text for path, text in self.files.items() if path.startswith(f"/tmp/slime-job-{tag}-")]
        return found


def run(harness, sb, **change):
    settings = {"workdir": "/w", "session_id": "s/1", "adapter_url": "http://host:1/", "time_budget_sec": 5}
    return asyncio.run(harness.run(sb, prompt="fix it; rm -rf '$HOME'", **{**settings, **change}))


def test_claude_code_is_pointed_at_the_adapter(monkeypatch):
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ARGS", "--max-turns 3")
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", '{"A": 1, "B": "two words"}')
    sb = NoteTaking()
    assert run(ClaudeCodeHarness(), sb) == 0
    script = sb.script("claude-code-s-1")
    assert "export ANTHROPIC_BASE_URL=http://host:1\n" in script
    assert "export CLAUDE_CODE_ATTRIBUTION_HEADER=0\n" in script
    assert "export ANTHROPIC_AUTH_TOKEN=s/1\n" in script
    assert "export B='two words'\n" in script
    assert "claude -p --dangerously-skip-permissions --output-format json --max-turns 3" in script
    assert sb.files["/home/agent/.slime-prompt"] == "fix it; rm -rf '$HOME'"
    assert "rm -rf" not in script  # the prompt is not part of a command
    assert json.loads(sb.files["/home/agent/.claude.json"])["hasCompletedOnboarding"]
    assert any(user == "agent" and "setsid" in cmd for user, cmd in sb.ran)


def test_codex_gets_a_provider_that_is_the_adapter():
    sb = NoteTaking()
    assert run(CodexHarness(), sb) == 0
    config = tomllib.loads(sb.files["/home/agent/.codex/config.toml"])
    provider = config["model_providers"][config["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == ("http://host:1/v1", "chat")
    script = sb.script("codex-s-1")
    assert f"export {provider['env_key']}=s/1\n" in script and "codex exec" in script


@pytest.mark.parametrize("by_setting", [True, False])
def test_node_and_the_package_come_from_tarballs_of_this_machine(tmp_path, monkeypatch, by_setting):
    node, package = tmp_path / "node.tar.xz", tmp_path / "cli.tgz"
    node.write_bytes(b"node")
    package.write_bytes(b"cli")
    if by_setting:
        monkeypatch.setenv("SLIME_AGENT_NODE_TARBALL", str(node))
    given = {} if by_setting else {"node_runtime": node}
    sb = NoteTaking("tool --version", "node -e")
    asyncio.run(install_npm_cli(sb, npm_package=package, check_cmd="tool --version", **given))
    assert (sb.files["/tmp/node22.tar"], sb.files["/tmp/npm-package.tgz"]) == (node, package)
    assert any("npm install -g" in cmd and "/tmp/npm-package.tgz" in cmd for _, cmd in sb.ran)


AGENT = """
import json, os, sys, urllib.request
task = sys.stdin.read()
body = {"model": "m", "messages": [{"role": "user", "content": task}], "max_tokens": 50}
headers = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", json.dumps(body).encode(), headers)
open("answer.txt", "w").write(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


class ScriptHarness(BaseHarness):
    """A dozen lines of Python as an agent program."""

    name = "script"

    async def install_cli(self, sb):
        await sb.write_file("agent.py", AGENT)

    async def write_config(self, sb, ctx):
        await sb.write_file("task", "")

    async def launch_and_wait(self, sb, ctx, prompt, time_budget_sec):
        await sb.write_file("task", prompt)
        command = f"{sys.executable} agent.py < task"
        env = {"KEY": ctx.session_id, "URL": ctx.adapter_url, "NO_PROXY": "*"}
        return await run_agent(sb, workdir=ctx.workdir, start_cmd=command, env=env, time_budget_sec=time_budget_sec)


def test_a_program_in_a_shell_becomes_a_sample(tokenizer):
    engine = TalkingEngine(tokenizer, lambda prompt: "forty-two")
    engine.start()
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url=engine.url)
    server = run_app_in_thread(adapter.app, host="127.0.0.1")

    async def play():
        harness = ScriptHarness()
        url = f"http://127.0.0.1:{server.port}"
        async with LocalSandbox(reach=url) as sb:
            adapter.open_session(sb.sandbox_id)
            ctx = HarnessContext(workdir=str(sb.folder), session_id=sb.sandbox_id, adapter_url=url)
            await harness.install_cli(sb)
            await harness.write_config(sb, ctx)
            assert await harness.launch_and_wait(sb, ctx, "what is it?", 30) == 0
            assert await sb.read_file("answer.txt") == "forty-two"
            return await adapter.finish_session(sb.sandbox_id, base_sample=Sample(index=0), reward=1.0)

    try:
        (sample,) = asyncio.run(play())
    finally:
        server.stop()
        engine.stop()
    assert tokenizer.decode(sample.tokens).endswith(
        "what is it?<|im_end|>\n<|im_start|>assistant\nforty-two<|im_end|>"
    )
    assert sample.loss_mask == [1] * sample.response_length
