"""The base class of harnesses, and shared steps: install Node, install a command from npm, run the agent."""

from __future__ import annotations

import json
import logging
import shlex
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slime.agent.sandbox import Sandbox, ensure_agent_user, exec_and_wait
from slime.agent.sandbox.protocol import AGENT_USER
from slime.utils.env import agent_setting
from slime.utils.errors import ConfigError
from slime.utils.misc import SingletonMeta

logger = logging.getLogger(__name__)

INSTALL_TIMEOUT_S = 600.0
NODE_HOME = "/opt/node22"
NODE_PATH = f"{NODE_HOME}/bin:$PATH"
HOME = f"/home/{AGENT_USER}"
MODEL_LABEL = "slime-actor"


class SingletonABCMeta(SingletonMeta, ABCMeta):
    """Metaclass for abstract classes whose concrete subclasses have one instance per process."""


async def install_node22(sb: Sandbox, node_runtime: Path | None = None) -> None:
    """Install Node 22, unless the sandbox has Node 22 or later.

    Args:
        node_runtime: Node's tarball on this machine; defaults to the file named by ``SLIME_AGENT_NODE_TARBALL``.

    Raises:
        ConfigError: the image has no Node 22 or later, and there is no tarball.
    """
    check = (
        f'export PATH="{NODE_PATH}"; node -e "process.exit(+process.versions.node.split(\\".\\")[0] >= 22 ? 0 : 1)"'
    )
    if await _succeeds(sb, check):
        return
    tarball = Path(node_runtime) if node_runtime else _tarball("NODE_TARBALL")
    if tarball is None:
        raise ConfigError(
            "The sandbox's image has no Node 22. Install it in the image, or set SLIME_AGENT_NODE_TARBALL to the "
            ".tar.gz or .tar.xz of nodejs.org for its platform."
        )
    await sb.write_file("/tmp/node22.tar", tarball)
    unpack = f"mkdir -p {NODE_HOME} && tar -xf /tmp/node22.tar -C {NODE_HOME} --strip-components=1"
    link = f"ln -sf {NODE_HOME}/bin/* /usr/local/bin/"
    await sb.exec(f"{unpack} && {link} && rm -f /tmp/node22.tar", timeout=INSTALL_TIMEOUT_S, check=True)


async def install_npm_cli(
    sb: Sandbox, *, node_runtime: Path | None = None, npm_package: str | Path, check_cmd: str
) -> None:
    """Install a command from npm, unless ``check_cmd`` already succeeds.

    Args:
        node_runtime: Node's tarball on this machine; see ``install_node22``.
        npm_package: A package name, or a tarball on this machine for sandboxes without network.
    """
    check = f'export PATH="{NODE_PATH}"; {check_cmd}'
    if await _succeeds(sb, check):
        return
    await install_node22(sb, node_runtime)
    source = str(npm_package)
    if isinstance(npm_package, Path):
        source = "/tmp/npm-package.tgz"
        await sb.write_file(source, npm_package)
    install = f'export PATH="{NODE_PATH}"; npm install -g --no-audit --no-fund {shlex.quote(source)}'
    await sb.exec(install, timeout=INSTALL_TIMEOUT_S, check=True)
    link = f"[ -d {NODE_HOME}/bin ] && ln -sf {NODE_HOME}/bin/* /usr/local/bin/ || true"
    await sb.exec(f"{link}; {check}", check=True)


async def run_agent(
    sb: Sandbox,
    *,
    workdir: str,
    start_cmd: str,
    env: Mapping[str, str] | None = None,
    time_budget_sec: float,
    tag: str = "agent",
    user: str = AGENT_USER,
) -> int:
    """Run an agent's command until it ends; return its exit code, or ``EXIT_TIME_BUDGET_EXCEEDED``."""
    code, output = await exec_and_wait(
        sb,
        cmd=f'export PATH="{NODE_PATH}"; {start_cmd}',
        time_budget_sec=time_budget_sec,
        tag="".join(c if c.isalnum() else "-" for c in tag),
        user=user,
        env=env,
        workdir=workdir,
    )
    if code != 0:
        logger.warning("%s in sandbox %s ended with code %d: ...%s", tag, sb.sandbox_id, code, output[-1000:])
    return code


async def _succeeds(sb: Sandbox, cmd: str) -> bool:
    code, _, _ = await sb.exec(cmd)
    return code == 0


def extra_envs(name: str) -> dict[str, str]:
    """Return the variables in ``SLIME_AGENT_<name>``, a JSON object such as ``{"A": "1"}``.

    Raises:
        ConfigError: the value is not a JSON object.
    """
    text = agent_setting(name) or "{}"
    try:
        variables = json.loads(text)
    except json.JSONDecodeError:
        variables = None
    if not isinstance(variables, dict):
        raise ConfigError(f'SLIME_AGENT_{name} is {text!r}; it must be a JSON object such as {{"A": "1"}}.')
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in variables.items()}


def _tarball(name: str) -> Path | None:
    text = agent_setting(name)
    if text is None:
        return None
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"SLIME_AGENT_{name} is {text!r}, which is not a file on this machine.")
    return path


# Harnesses


@dataclass(frozen=True)
class HarnessContext:
    """Arguments of one run of an agent program."""

    workdir: str
    """The program's working directory."""
    session_id: str
    """Sent as API key, by which the adapter recognizes the program's turns."""
    adapter_url: str
    """``http://host:port`` of the adapter, as the sandbox reaches it."""
    model_label: str = MODEL_LABEL
    """Model name in requests and logs; the adapter ignores it and serves one model."""


class BaseHarness(metaclass=SingletonABCMeta):
    """Installs, configures and runs one agent program.  Subclasses are stateless: one object serves all sandboxes."""

    name: str = "harness"

    @abstractmethod
    async def install_cli(self, sb: Sandbox) -> None:
        """Install the program in the sandbox, unless it is already there."""

    @abstractmethod
    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the program's settings, which point it at the adapter."""

    @abstractmethod
    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Run the program on ``prompt`` until it ends; return its exit code."""

    async def run(
        self,
        sb: Sandbox,
        *,
        workdir: str,
        session_id: str,
        adapter_url: str,
        time_budget_sec: float,
        prompt: str,
    ) -> int:
        """Install, configure and run the program; return its exit code, or ``EXIT_TIME_BUDGET_EXCEEDED``.

        Args:
            workdir: The agent's working directory; its owner becomes the user ``agent``.
            time_budget_sec: Time limit of the agent; installation has separate deadlines.
        """
        ctx = HarnessContext(workdir=workdir, session_id=session_id, adapter_url=adapter_url.rstrip("/"))
        await ensure_agent_user(sb, workdir)
        await self.install_cli(sb)
        await self.write_config(sb, ctx)
        code = await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)
        logger.info("%s: session %s ended with code %d in sandbox %s.", self.name, session_id, code, sb.sandbox_id)
        return code


class NpmHarness(BaseHarness):
    """The harness of a program from npm.

    Its settings are ``SLIME_AGENT_<setting>_TARBALL``, an npm tarball for sandboxes without network, and
    ``SLIME_AGENT_<setting>_EXTRA_ARGS`` and ``..._EXTRA_ENVS``, which are added to its command and environment.
    """

    setting: str
    """The program's part of the setting names."""
    npm_package: str
    check_cmd: str
    """A command that succeeds if the program is installed."""

    @abstractmethod
    def environment(self, ctx: HarnessContext) -> dict[str, str]:
        """Return the variables that point the program at the adapter."""

    @abstractmethod
    def start_cmd(self, extra_args: str) -> str:
        """Return the command, which reads the prompt from standard input."""

    async def install_cli(self, sb: Sandbox) -> None:
        """Install Node and the package, unless the program already runs."""
        package = _tarball(f"{self.setting}_TARBALL") or self.npm_package
        await install_npm_cli(sb, npm_package=package, check_cmd=self.check_cmd)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Run the program with the prompt from a file, so that no shell parses it."""
        prompt_file = f"{HOME}/.slime-prompt"
        await sb.write_file(prompt_file, prompt, user=AGENT_USER)
        extra_args = shlex.join(shlex.split(agent_setting(f"{self.setting}_EXTRA_ARGS") or ""))
        variables = {"HOME": HOME, "NO_PROXY": "*", **self.environment(ctx)}
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd=f"{self.start_cmd(extra_args)} < {prompt_file}",
            env=variables | extra_envs(f"{self.setting}_EXTRA_ENVS"),
            time_budget_sec=time_budget_sec,
            tag=f"{self.name}-{ctx.session_id}",
        )
