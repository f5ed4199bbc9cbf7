"""One agent program, as a class with one instance."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass

from slime.agent.harness.common import SingletonABCMeta
from slime.agent.sandbox import Sandbox, ensure_agent_user

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HarnessContext:
    """What an agent program must know."""

    workdir: str
    """Where it works."""
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
