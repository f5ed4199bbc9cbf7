"""Finds waits in source code, and those without a deadline; used by ``test_waits``.

A wait is a blocking call of Python, asyncio, Ray, subprocess, queue or the HTTP clients, recognized from the
call alone.  This cannot see whether an outer deadline covers a wait; such waits are listed, with the reason, in
``test_waits.UNTIMED``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.contracts.source_tree import REPO, module_name, tree_of

TRAINER_SIDE = (
    *("slime.backends.megatron_utils", "slime.backends.train_worker", "slime.weights", "slime.train_data"),
    "slime.ext.low_precision",
)
"""Collectives, whose deadline is ``--distributed-timeout-minutes``."""
ROLLOUT_SIDE = ("slime", "slime_plugins/graders", "slime_plugins/rollout_buffer")

TIMED_ARGUMENTS = frozenset({"timeout", "timeout_s", "timeout_sec"})
CLIENT_MODULES = frozenset({"requests", "httpx"})
CLIENT_VERBS = frozenset({"get", "post", "put", "delete", "request", "stream", "urlopen"})
SUBPROCESS_CALLS = frozenset({"run", "call", "check_call", "check_output"})


@dataclass(frozen=True)
class Wait:
    """One call that may block."""

    module: str
    function: str
    """Dotted name with its class; empty at module level."""
    line: int
    call: str
    """As written, without its arguments."""
    is_timed: bool

    @property
    def place(self) -> str:
        """``module.function: call``."""
        return f"{self.module}.{self.function}: {self.call}".replace(".:", ":")


def rollout_side_files() -> Iterator[Path]:
    for name in ROLLOUT_SIDE:
        for path in sorted((REPO / name).rglob("*.py")):
            if not module_name(path).startswith(TRAINER_SIDE):
                yield path


def waits_of(path: Path) -> Iterator[Wait]:
    yield from waits_in(tree_of(path), module_name(path))


def waits_in(tree: ast.Module, module: str) -> Iterator[Wait]:
    finder = _Finder(module)
    finder.visit(tree)
    yield from finder.found


class _Finder(ast.NodeVisitor):
    def __init__(self, module: str) -> None:
        self.module = module
        self.found: list[Wait] = []
        self._names: list[str] = []
        self._is_async = [False]
        self._under_timeout = 0
        self._wrapped: set[int] = set()
        """Ids of calls inside ``asyncio.wait_for`` or an ``asyncio.timeout`` block."""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node, is_async=False)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node, is_async=False)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._inside(node, is_async=True)

    def _inside(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, *, is_async: bool) -> None:
        outer, self._under_timeout = self._under_timeout, 0
        self._names.append(node.name)
        self._is_async.append(is_async)
        self.generic_visit(node)
        self._is_async.pop()
        self._names.pop()
        self._under_timeout = outer

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        is_limited = any(_is_limit(item.context_expr) for item in node.items)
        for item in node.items:
            self.visit(item)
        self._under_timeout += is_limited
        for statement in node.body:
            self.visit(statement)
        self._under_timeout -= is_limited

    def visit_Await(self, node: ast.Await) -> None:
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith(".remote"):
            self._add(node.value, is_timed=False)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name == "asyncio.wait_for" and node.args:
            self._wrapped.update(id(inner) for inner in ast.walk(node.args[0]))
        is_timed = self._judge(node, name)
        if is_timed is not None:
            self._add(node, is_timed=is_timed)
        self.generic_visit(node)

    def _add(self, node: ast.Call, *, is_timed: bool) -> None:
        is_timed = is_timed or bool(self._under_timeout) or id(node) in self._wrapped
        self.found.append(
            Wait(self.module, ".".join(self._names), node.lineno, ast.unparse(node.func).replace("\n", " "), is_timed)
        )

    def _judge(self, node: ast.Call, name: str) -> bool | None:
        """Whether the wait has a deadline; None if the call is not a wait."""
        owner, _, verb = name.rpartition(".")
        has_keyword = any(k.arg in TIMED_ARGUMENTS and not _may_be_none(k.value) for k in node.keywords)
        num_args = len(node.args)
        if name in ("ray.get", "ray.wait", "asyncio.wait", "asyncio.wait_for"):
            return has_keyword or (name == "asyncio.wait_for" and num_args > 1 and not _may_be_none(node.args[1]))
        if name == "asyncio.gather":
            return False
        if name == "asyncio.timeout":
            return _is_limit(node)
        if name == "wait_for" or verb == "_probe":
            return has_keyword or None
        if name in ("aiohttp.ClientSession", "urlopen", "urllib.request.urlopen", "socket.create_connection"):
            return has_keyword
        if owner in CLIENT_MODULES and verb in CLIENT_VERBS:
            return has_keyword
        if owner == "httpx" and verb in ("Client", "AsyncClient"):
            return has_keyword
        if owner == "subprocess" and verb in SUBPROCESS_CALLS:
            return has_keyword
        if verb in ("wait", "communicate", "join", "acquire") and owner and not _is_text(node):
            return has_keyword or num_args > 0
        if verb == "get" and owner and not num_args and not node.keywords:
            return False  # Queue.get(); a mapping's get has a key
        if verb == "result" and not self._is_async[-1]:
            return has_keyword or num_args > 0
        return None


def _is_text(node: ast.Call) -> bool:
    """``", ".join(...)`` and ``os.path.join(...)``."""
    assert isinstance(node.func, ast.Attribute)
    is_literal = isinstance(node.func.value, ast.Constant | ast.JoinedStr)
    takes_text = node.func.attr == "join" and len(node.args) >= 1 and not isinstance(node.args[0], ast.Attribute)
    return is_literal or takes_text or ast.unparse(node.func.value) == "os.path"


def _may_be_none(node: ast.expr) -> bool:
    if isinstance(node, ast.IfExp):
        return _may_be_none(node.body) or _may_be_none(node.orelse)
    return isinstance(node, ast.Constant) and node.value is None


def _is_limit(node: ast.expr) -> bool:
    """``asyncio.timeout(x)`` with an x that is not None."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "asyncio.timeout"
        and bool(node.args)
        and not _may_be_none(node.args[0])
    )
