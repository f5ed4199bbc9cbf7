"""Sandboxes for an agent's commands: the protocol, Daytona, E2B, and this machine."""

from slime.agent.sandbox.daytona import DaytonaSandbox
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
from slime.isolation.view import check_local_sandbox

__all__ = [
    "EXIT_TIME_BUDGET_EXCEEDED",
    "DaytonaSandbox",
    "E2BSandbox",
    "ExecResult",
    "FileContent",
    "LocalSandbox",
    "Sandbox",
    "SandboxError",
    "check_local_sandbox",
    "ensure_agent_user",
    "exec_and_wait",
]
