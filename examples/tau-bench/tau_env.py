"""Environments with the interface of tau-bench: a user, a database, and tools between the two.

``get_env("retail", ...)`` and ``"airline"`` come from the package ``tau_bench``, which is on no package index: install
it from its repository.  ``get_env("orders")`` is here, needs nothing, and is small enough for the tiny model: a user
wants the last of their orders cancelled.

The interface is tau-bench's (arXiv:2406.12045): ``reset(task_index)``, ``step(Action)``, ``tools_info``, ``wiki``; the
reward is 1 when the database ends as the task's own actions would leave it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from examples.tiny_tools.agents import order_request, order_task

RESPOND = "respond"
"""Name of the action that speaks to the user."""
STOP = "###STOP###"
"""What the user says when they have nothing more to say."""


@dataclass
class Action:
    """A call of a tool, or words for the user: ``Action("respond", {"content": text})``."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class EnvResponse:
    """What an action led to."""

    observation: str
    reward: float = 0.0
    done: bool = False
    info: Any = None


class Env(Protocol):
    """What examples/tau-bench needs of an environment."""

    tools_info: list[dict[str, Any]]
    wiki: str

    def reset(self, task_index: int | None = None) -> Any:
        """Begin a task; the answer's ``observation`` is what the user says first."""

    def step(self, action: Any) -> Any:
        """Act; the answer has ``observation``, ``reward`` and ``done``."""


def get_env(name: str, **settings: Any) -> tuple[Env, type]:
    """Return the environment and its class of actions.

    Args:
        name: ``orders``, or an environment of tau-bench.
        settings: ``user_strategy``, ``user_model``, ``user_provider``, ``task_split`` of tau-bench; none here.
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
    """A shop with one user, whose last order is to be cancelled."""

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
        """Run a tool; after words for the user the task is over."""
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
        """Return 1 when the database is as it should be."""
        return float(self.data == self.wanted)
