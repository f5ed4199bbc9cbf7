"""A minimal coding agent for the tiny model, which runs in a sandbox like Claude Code would.

It sends the task, writes the returned Python block to ``f.py`` and runs the tests.  If they fail, it shows their error
message to the model, which may try once more.
"""

from __future__ import annotations

from slime.agent.harness import BaseHarness, HarnessContext
from slime.agent.harness.common import run_agent
from slime.agent.sandbox import Sandbox

AGENT = """\
import json, os, re, subprocess, sys, urllib.request

messages = [{"role": "user", "content": sys.stdin.read()}]
headers = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
for attempt in range(2):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]["message"]["content"] or ""
    blocks = re.findall("```python\\n(.*?)```", answer, re.DOTALL)
    open("f.py", "w").write(blocks[-1] if blocks else "")
    done = subprocess.run(os.environ["TEST"], shell=True, capture_output=True, text=True, timeout=10)
    if done.returncode == 0:
        break
    said = done.stderr.strip().rpartition("Error: ")[2] or "no words"
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]
"""


class TinyAgentHarness(BaseHarness):
    """The harness of ``AGENT``, for sandboxes with Python."""

    name = "tiny-agent"

    async def install_cli(self, sb: Sandbox) -> None:
        """Write the program."""
        await sb.write_file("agent.py", AGENT)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Do nothing: the program is configured by environment variables."""

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Run the program with the task on standard input."""
        await sb.write_file("task", prompt)
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd="python3 -I -S agent.py < task",
            env={"KEY": ctx.session_id, "URL": ctx.adapter_url, "TEST": "python3 -B test_f.py", "NO_PROXY": "*"},
            time_budget_sec=time_budget_sec,
            tag=f"{self.name}-{ctx.session_id}",
            user="root",
        )

    async def run(self, sb: Sandbox, *, workdir, session_id, adapter_url, time_budget_sec, prompt) -> int:
        """Install and run the program, without creating a user ``agent``, which a local sandbox cannot."""
        ctx = HarnessContext(workdir, session_id, adapter_url)
        await self.install_cli(sb)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)
