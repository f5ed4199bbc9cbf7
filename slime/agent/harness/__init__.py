"""Harnesses of agent programs: install each in a sandbox, point it at an adapter, and start it.

Each class here is one program; ``common`` has the shared parts.
"""

from __future__ import annotations

import json

from slime.agent.harness.common import HOME, BaseHarness, HarnessContext, NpmHarness
from slime.agent.sandbox import Sandbox
from slime.agent.sandbox.protocol import AGENT_USER

__all__ = ["BaseHarness", "ClaudeCodeHarness", "CodexHarness", "HarnessContext"]

KEY_VARIABLE = "SLIME_SESSION"
"""Environment variable from which Codex reads its provider's API key."""


class ClaudeCodeHarness(NpmHarness):
    """Claude Code (``claude -p``) with the Anthropic adapter; settings ``SLIME_AGENT_CC_*``."""

    name = "claude-code"
    setting = "CC"
    npm_package = "@anthropic-ai/claude-code"
    check_cmd = "claude --version"

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write settings that skip the dialogs of a first start."""
        state = {"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True}
        await sb.write_file(f"{HOME}/.claude.json", json.dumps(state), user=AGENT_USER)
        settings = {"includeCoAuthoredBy": False, "cleanupPeriodDays": 1}
        await sb.write_file(f"{HOME}/.claude/settings.json", json.dumps(settings), user=AGENT_USER)

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        """Return variables that point it at the adapter and turn off connections to other servers."""
        return {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
            "ANTHROPIC_SMALL_FAST_MODEL": ctx.model_label,
            # Its billing header changes the system prompt in every request: no turn would continue the previous one.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
        }

    def start_cmd(self, extra_args: str) -> str:
        return f"claude -p --dangerously-skip-permissions --output-format json {extra_args}"


class CodexHarness(NpmHarness):
    """Codex (``codex exec``) with the OpenAI adapter; settings ``SLIME_AGENT_CODEX_*``.

    Needs a version that supports ``wire_api = "chat"``.
    """

    name = "codex"
    setting = "CODEX"
    npm_package = "@openai/codex"
    check_cmd = "codex --version"

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write a configuration with the adapter as provider."""
        lines = [
            f"model = {json.dumps(ctx.model_label)}",
            'model_provider = "slime"',
            'approval_policy = "never"',
            'sandbox_mode = "danger-full-access"',
            "[model_providers.slime]",
            'name = "slime"',
            f"base_url = {json.dumps(ctx.adapter_url + '/v1')}",
            f"env_key = {json.dumps(KEY_VARIABLE)}",
            'wire_api = "chat"',
            "[analytics]",
            "enabled = false",
        ]
        await sb.write_file(f"{HOME}/.codex/config.toml", "\n".join([*lines, ""]), user=AGENT_USER)

    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        return {KEY_VARIABLE: ctx.session_id}

    def start_cmd(self, extra_args: str) -> str:
        return f"codex exec --skip-git-repo-check --json {extra_args} -"
