"""Codex, behind the OpenAI adapter."""

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
KEY_VARIABLE = "SLIME_SESSION"


class CodexHarness(BaseHarness):
    """The harness of ``codex exec`` over chat completions; the version must be one that offers ``wire_api = "chat"``.

    ``SLIME_AGENT_CODEX_TARBALL`` is an npm tarball of such a version; ``SLIME_AGENT_CODEX_EXTRA_ARGS`` and
    ``SLIME_AGENT_CODEX_EXTRA_ENVS`` are added to the command and its environment.
    """

    name = "codex"

    async def install_cli(self, sb: Sandbox) -> None:
        """Install Node and the package, unless ``codex`` runs already."""
        package = npm_source("CODEX_TARBALL", "@openai/codex")
        await install_npm_cli(sb, node_runtime=install_node22, npm_package=package, check_cmd="codex --version")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write a configuration whose provider is the adapter."""
        lines = [
            f"model = {json.dumps(MODEL)}",
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

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Run ``codex exec -`` with the prompt from a file, so that no shell reads it."""
        prompt_file = f"{HOME}/.slime-prompt"
        await sb.write_file(prompt_file, prompt, user=AGENT_USER)
        flags = f"--skip-git-repo-check --json {extra_args('CODEX_EXTRA_ARGS')}"
        return await run_agent(
            sb,
            name=self.name,
            cmd=f"codex exec {flags} - < {prompt_file}",
            workdir=ctx.workdir,
            session_id=ctx.session_id,
            time_budget_sec=time_budget_sec,
            env={"HOME": HOME, KEY_VARIABLE: ctx.session_id, "NO_PROXY": "*", **extra_envs("CODEX_EXTRA_ENVS")},
        )
