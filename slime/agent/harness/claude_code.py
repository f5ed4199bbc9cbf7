"""Claude Code, behind the Anthropic adapter."""

from __future__ import annotations

import json

from slime.agent.harness.common import (
    BaseHarness,
    HarnessContext,
    extra_args,
    extra_envs,
    install_node22,
    install_npm_cli,
    npm_source,
    run_agent,
)
from slime.agent.sandbox import Sandbox
from slime.agent.sandbox.protocol import AGENT_USER

MODEL = "slime"
HOME = f"/home/{AGENT_USER}"


class ClaudeCodeHarness(BaseHarness):
    """The harness of ``claude -p``.

    ``SLIME_AGENT_CC_TARBALL`` is an npm tarball for sandboxes without network; ``SLIME_AGENT_CC_EXTRA_ARGS`` and
    ``SLIME_AGENT_CC_EXTRA_ENVS`` are added to the command and its environment.
    """

    name = "claude-code"

    async def install_cli(self, sb: Sandbox) -> None:
        """Install Node and the package, unless ``claude`` runs already."""
        package = npm_source("CC_TARBALL", "@anthropic-ai/claude-code")
        await install_npm_cli(sb, node_runtime=install_node22, npm_package=package, check_cmd="claude --version")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write settings that answer the questions of a first start."""
        state = {"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True}
        await sb.write_file(f"{HOME}/.claude.json", json.dumps(state), user=AGENT_USER)
        settings = {"includeCoAuthoredBy": False, "cleanupPeriodDays": 1}
        await sb.write_file(f"{HOME}/.claude/settings.json", json.dumps(settings), user=AGENT_USER)

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        """Return variables that point it at the adapter and turn off everything that talks to other servers."""
        return {
            "HOME": HOME,
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "NO_PROXY": "*",
            **extra_envs("CC_EXTRA_ENVS"),
        }

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Run ``claude -p`` with the prompt from a file, so that no shell reads it."""
        prompt_file = f"{HOME}/.slime-prompt"
        await sb.write_file(prompt_file, prompt, user=AGENT_USER)
        flags = f"-p --dangerously-skip-permissions --output-format json {extra_args('CC_EXTRA_ARGS')}"
        return await run_agent(
            sb,
            name=self.name,
            cmd=f"claude {flags} < {prompt_file}",
            workdir=ctx.workdir,
            session_id=ctx.session_id,
            time_budget_sec=time_budget_sec,
            env=self.environment(ctx),
        )
