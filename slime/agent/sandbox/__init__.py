"""Sandboxes for an agent's commands: the protocol, E2B, and this machine."""

from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.protocol import (
    EXIT_TIME_BUDGET_EXCEEDED,
    ExecResult,
    FileContent,
    Sandbox,
    SandboxError,
    ensure_agent_user,
    exec_and_wait,
)

__all__ = [
    "EXIT_TIME_BUDGET_EXCEEDED",
    "E2BSandbox",
    "ExecResult",
    "FileContent",
    "LocalSandbox",
    "Sandbox",
    "SandboxError",
    "ensure_agent_user",
    "exec_and_wait",
]
