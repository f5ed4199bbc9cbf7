"""``--custom-generate-function-path examples.coding_agent_rl.generate.generate``: a coding agent in a sandbox.

A row's metadata defines the task::

    question    the task given to the agent (default: the prompt)
    files       {path: text}, written before the agent starts and again before the tests
    test        a command; the reward is 1 if it succeeds after the agent has finished
    image       image of the sandbox, for agents in E2B
    workdir     working directory in the image

Settings, by ``--custom-config-path``: ``coding_agent`` (``tiny``, ``claude-code`` or ``codex``),
``coding_agent_host`` (this machine, as sandboxes reach it), ``coding_agent_time_s``, ``coding_agent_sandboxes``.
"""

from __future__ import annotations

import asyncio
import functools
from argparse import Namespace
from typing import Any

from examples.coding_agent_rl.tiny_agent import TinyAgentHarness
from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.harness import ClaudeCodeHarness, CodexHarness
from slime.agent.sandbox import E2BSandbox, LocalSandbox, Sandbox, SandboxError, check_local_sandbox
from slime.ext.agent.session import play
from slime.utils.types import Sample

AGENTS = {
    "tiny": (TinyAgentHarness, OpenAIAdapter),
    "claude-code": (ClaudeCodeHarness, AnthropicAdapter),
    "codex": (CodexHarness, OpenAIAdapter),
}
TEST_TIMEOUT_S = 300.0


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """Run the agent; each of its conversations becomes a sample, with the test result as reward."""
    harness_class, adapter_class = AGENTS[getattr(args, "coding_agent", "tiny")]
    facts = sample.metadata

    async def work(url: str, sid: str) -> float:
        async with _free(getattr(args, "coding_agent_sandboxes", 8), id(asyncio.get_running_loop())):
            async with _sandbox(args, facts, url) as sb:
                workdir = facts.get("workdir") or str(getattr(sb, "folder", "/work"))
                await _write(sb, workdir, facts)
                await harness_class().run(
                    sb,
                    workdir=workdir,
                    session_id=sid,
                    adapter_url=sb.address_of(url) if isinstance(sb, LocalSandbox) else url,
                    time_budget_sec=getattr(args, "coding_agent_time_s", 600),
                    prompt=str(facts.get("question", sample.prompt)),
                )
                await _write(sb, workdir, facts)  # restore the tests, in case the agent changed them
                try:
                    code, _, _ = await sb.exec(f"cd {workdir} && {facts['test']}", timeout=TEST_TIMEOUT_S)
                except SandboxError:  # the solution does not end, or takes too much memory
                    await sb.exec("true", check=True)  # raises if the sandbox itself is gone
                    return 0.0
                return float(code == 0)

    host = getattr(args, "coding_agent_host", "127.0.0.1")
    return await play(args, sample, sampling_params, work, adapter_class=adapter_class, host=host)


def check(args: Namespace) -> None:
    """Refuse to start on machines that cannot isolate a local sandbox."""
    if getattr(args, "coding_agent", "tiny") == "tiny":  # other agents run in E2B
        check_local_sandbox(args)


generate.check_args = check


def _sandbox(args: Namespace, facts: dict[str, Any], url: str) -> Sandbox:
    if "image" in facts:
        return E2BSandbox(facts["image"])
    return LocalSandbox(reach=url, is_unsafe=getattr(args, "unsafe_local_sandbox", False))


@functools.cache
def _free(count: int, loop: int) -> asyncio.Semaphore:
    """Return the semaphore that limits the sandboxes of one event loop."""
    return asyncio.Semaphore(count)


async def _write(sb: Sandbox, workdir: str, facts: dict[str, Any]) -> None:
    for path, text in (facts.get("files") or {}).items():
        await sb.write_file(f"{workdir}/{path}", text)
