"""The base class of harnesses, and the steps they share: install Node and a command from npm, run the agent."""

from __future__ import annotations

import logging
import shlex
from abc import ABCMeta, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
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

NodeRuntime = Callable[[Sandbox], Awaitable[None]]


class SingletonABCMeta(SingletonMeta, ABCMeta):
    """Metaclass of abstract classes whose concrete subclasses have one instance per process."""


async def install_node22(sb: Sandbox) -> None:
    """Install Node 22 from the tarball ``SLIME_AGENT_NODE_TARBALL`` of this machine, unless the sandbox has it.

    Raises:
        ConfigError: the image has no Node of version 22 and there is no tarball.
    """
    check = (
        f'export PATH="{NODE_PATH}"; node -e "process.exit(+process.versions.node.split(\\".\\")[0] >= 22 ? 0 : 1)"'
    )
    if (await sb.exec(check)).code == 0:
        return
    tarball = _tarball("NODE_TARBALL")
    if tarball is None:
        raise ConfigError(
            "The sandbox's image has no Node 22. Put it into the image, or set SLIME_AGENT_NODE_TARBALL to the "
            ".tar.gz or .tar.xz of nodejs.org for its platform."
        )
    await sb.write_file("/tmp/node22.tar", tarball)
    unpack = f"mkdir -p {NODE_HOME} && tar -xf /tmp/node22.tar -C {NODE_HOME} --strip-components=1"
    link = f"ln -sf {NODE_HOME}/bin/* /usr/local/bin/"
    await sb.exec(f"{unpack} && {link} && rm -f /tmp/node22.tar", timeout=INSTALL_TIMEOUT_S, check=True)


async def install_npm_cli(sb: Sandbox, *, node_runtime: NodeRuntime, npm_package: str | Path, check_cmd: str) -> None:
    """Install a command from npm, unless ``check_cmd`` succeeds already.

    Args:
        sb: the sandbox.
        node_runtime: installs Node, such as ``install_node22``.
        npm_package: a package's name, or a tarball of this machine (for sandboxes without network).
        check_cmd: succeeds when the command is there.
    """
    check = f'export PATH="{NODE_PATH}"; {check_cmd}'
    if (await sb.exec(check)).code == 0:
        return
    await node_runtime(sb)
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
    name: str,
    cmd: str,
    workdir: str,
    session_id: str,
    time_budget_sec: float,
    env: Mapping[str, str] | None = None,
    user: str = AGENT_USER,
) -> int:
    """Run an agent's command to its end; its exit code, or ``EXIT_TIME_BUDGET_EXCEEDED``."""
    tag = f"{name}-{''.join(c if c.isalnum() else '-' for c in session_id)}"
    code, output = await exec_and_wait(
        sb,
        cmd=f'export PATH="{NODE_PATH}"; {cmd}',
        time_budget_sec=time_budget_sec,
        tag=tag,
        user=user,
        env=env,
        workdir=workdir,
        want_output=True,
    )
    if code != 0:
        logger.warning("%s of session %s ended with code %d: ...%s", name, session_id, code, output[-1000:])
    return code


def extra_args(name: str) -> str:
    """Return the words of ``SLIME_AGENT_<name>``, quoted for a shell."""
    return shlex.join(shlex.split(agent_setting(name) or ""))


def extra_envs(name: str) -> dict[str, str]:
    """Return the variables of ``SLIME_AGENT_<name>``, written as ``A=1 B='two words'``.

    Raises:
        ConfigError: a word has no ``=``.
    """
    variables = {}
    for word in shlex.split(agent_setting(name) or ""):
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"SLIME_AGENT_{name} has {word!r}; it must be a list of NAME=value.")
        variables[key] = value
    return variables


def npm_source(tarball_setting: str, package: str) -> str | Path:
    """Return the tarball that ``SLIME_AGENT_<tarball_setting>`` names, else the package's name."""
    return _tarball(tarball_setting) or package


def _tarball(name: str) -> Path | None:
    text = agent_setting(name)
    if text is None:
        return None
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"SLIME_AGENT_{name} is {text!r}, which is not a file of this machine.")
    return path


# The base class


@dataclass(frozen=True, kw_only=True)
class HarnessContext:
    """Arguments of one run of an agent program."""

    workdir: str
    """The folder it works in."""
    session_id: str
    """Sent as its API key, by which the adapter knows its turns."""
    adapter_url: str
    """``http://host:port`` of the adapter, as the sandbox reaches it."""


class BaseHarness(metaclass=SingletonABCMeta):
    """Installs, configures and runs one agent program.  Subclasses hold no state: one serves all sandboxes."""

    name: str = "harness"

    @abstractmethod
    async def install_cli(self, sb: Sandbox) -> None:
        """Put the program into the sandbox; return at once when it is there."""

    @abstractmethod
    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the program's settings, which point it at the adapter."""

    @abstractmethod
    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Give the program its task and wait for its end; its exit code."""

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
        """Install, configure and run; the exit code, or ``EXIT_TIME_BUDGET_EXCEEDED``.

        Args:
            sb: an entered sandbox.
            workdir: the folder the agent works in; it comes to belong to the user ``agent``.
            session_id: of the adapter's session.
            adapter_url: of the adapter, as the sandbox reaches it.
            time_budget_sec: for the agent alone; installation has deadlines of its own.
            prompt: the task.
        """
        ctx = HarnessContext(workdir=workdir, session_id=session_id, adapter_url=adapter_url.rstrip("/"))
        await ensure_agent_user(sb, workdir)
        await self.install_cli(sb)
        await self.write_config(sb, ctx)
        code = await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)
        logger.info("%s: session %s ended with code %d in sandbox %s.", self.name, session_id, code, sb.sandbox_id)
        return code
