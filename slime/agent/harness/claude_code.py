"""Claude Code, behind the Anthropic adapter."""

from __future__ import annotations

import json

from slime.agent.harness.common import HOME, HarnessContext, NpmHarness
from slime.agent.sandbox import Sandbox
from slime.agent.sandbox.protocol import AGENT_USER


class ClaudeCodeHarness(NpmHarness):
    """The harness of ``claude -p``, with the settings ``SLIME_AGENT_CC_*``."""

    name = "claude-code"
    setting = "CC"
    npm_package = "@anthropic-ai/claude-code"
    check_cmd = "claude --version"

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write settings that answer the questions of a first start."""
        state = {"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True}
        await sb.write_file(f"{HOME}/.claude.json", json.dumps(state), user=AGENT_USER)
        settings = {"includeCoAuthoredBy": False, "cleanupPeriodDays": 1}
        await sb.write_file(f"{HOME}/.claude/settings.json", json.dumps(settings), user=AGENT_USER)

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        """Return variables that point it at the adapter and turn off everything that talks to other servers."""
        return {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
            "ANTHROPIC_SMALL_FAST_MODEL": ctx.model_label,
            # Its billing header changes the system prompt at every request: no turn would continue the one before.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
        }

    def start_cmd(self, extra_args: str) -> str:
        """Return the command."""
        return f"claude -p --dangerously-skip-permissions --output-format json {extra_args}"
