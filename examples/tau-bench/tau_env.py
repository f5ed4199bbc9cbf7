"""Environments with tau-bench's interface: a user, a database, and tools to access it.

``get_env("retail", ...)`` and ``"airline"`` come from the package ``tau_bench``, which is not on a package index:
install it from its repository.  ``get_env("orders")`` is defined here, has no dependencies, and is small enough for
the tiny model: a user wants to cancel their last order.

The interface is tau-bench's (arXiv:2406.12045): ``reset(task_index)``, ``step(Action)``, ``tools_info``, ``wiki``.
The reward is 1 if the final database is the one that the task's reference actions produce.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from examples.tiny_tools.agents import order_request, order_task

RESPOND = "respond"
"""Name of the action that sends a message to the user."""
STOP = "###STOP###"
"""The user's message that ends the conversation."""


@dataclass
class Action:
    """A tool call, or a message to the user: ``Action("respond", {"content": text})``."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class EnvResponse:
    """The result of an action."""

    observation: str
    reward: float = 0.0
    done: bool = False
    info: Any = None


class Env(Protocol):
    """The interface of environments that this example requires."""

    tools_info: list[dict[str, Any]]
    wiki: str

    def reset(self, task_index: int | None = None) -> Any:
        """Begin a task; the result's ``observation`` is the user's first message."""

    def step(self, action: Any) -> Any:
        """Perform an action; the result has ``observation``, ``reward`` and ``done``."""


def get_env(name: str, **settings: Any) -> tuple[Env, type]:
    """Return the environment and its action class.

    Args:
        name: ``orders``, or an environment of tau-bench.
        settings: tau-bench's ``user_strategy``, ``user_model``, ``user_provider``, ``task_split``; ignored by
            ``orders``.
    """
    if name == "orders":
        return OrdersEnv(), Action
    from tau_bench.envs import get_env as their_env
    from tau_bench.types import Action as TheirAction

    return their_env(name, **settings), TheirAction


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


class OrdersEnv:
    """A shop with one user, who wants to cancel their last order."""

    tools_info = [
        _tool("get_orders", "The open orders of a user.", user="string"),
        _tool("cancel_order", "Cancel an order.", order="integer"),
    ]
    wiki = ""

    def __init__(self) -> None:
        self.data: dict[str, list[int]] = {}
        self.wanted: dict[str, list[int]] = {}

    def reset(self, task_index: int | None = None) -> EnvResponse:
        """Begin task ``task_index``."""
        name, orders = order_task(task_index or 0)
        self.data = {name: orders}
        self.wanted = copy.deepcopy(self.data)
        self.wanted[name].pop()
        return EnvResponse(order_request(name))

    def step(self, action: Action) -> EnvResponse:
        """Run a tool; a message to the user ends the task."""
        if action.name == RESPOND:
            return EnvResponse(STOP, reward=self.calculate_reward(), done=True)
        if action.name == "get_orders":
            orders = self.data.get(str(action.kwargs.get("user")))
            return EnvResponse("no such user" if orders is None else " ".join(map(str, orders)))
        if action.name == "cancel_order":
            for orders in self.data.values():
                if action.kwargs.get("order") in orders:
                    orders.remove(action.kwargs["order"])
                    return EnvResponse("ok")
            return EnvResponse("no such order")
        return EnvResponse(f"no such tool: {action.name}")

    def calculate_reward(self) -> float:
        """Return 1 if the database is in the required state, else 0."""
        return float(self.data == self.wanted)
