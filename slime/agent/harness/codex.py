"""Codex, behind the OpenAI adapter."""

from __future__ import annotations

import json

from slime.agent.harness.common import HOME, HarnessContext, NpmHarness
from slime.agent.sandbox import Sandbox
from slime.agent.sandbox.protocol import AGENT_USER

KEY_VARIABLE = "SLIME_SESSION"


class CodexHarness(NpmHarness):
    """The harness of ``codex exec`` over chat completions, with the settings ``SLIME_AGENT_CODEX_*``.

    The version must be one that offers ``wire_api = "chat"``.
    """

    name = "codex"
    setting = "CODEX"
    npm_package = "@openai/codex"
    check_cmd = "codex --version"

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write a configuration whose provider is the adapter."""
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
        """Return the session as the provider's key."""
        return {KEY_VARIABLE: ctx.session_id}

    def start_cmd(self, extra_args: str) -> str:
        """Return the command."""
        return f"codex exec --skip-git-repo-check --json {extra_args} -"
