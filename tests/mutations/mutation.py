"""Mutations: a known bug as a small patch of one function, which is restored afterwards.

The mutant is the function's own source with one piece of text replaced.  Its code object replaces the original's, so
that all holders of the function (importers, registries, classes) get the mutant, and only one attribute must be
restored.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """One known bug, with the checks that must catch it."""

    bug: str
    """The bug in a few words; its name in the table."""
    target: str
    """``module:function`` or ``module:Class.method``."""
    old: str
    """Text that occurs once in the source of the target."""
    new: str
    """Its replacement."""
    tests: tuple[str, ...] = ()
    """Test ids (file::function[parameters]); each passes, and fails with the mutant."""
    cells: tuple[tuple[str, str], ...] = ()
    """(layout, variant) of ``tests.oracle.variants`` that agree with the reference, but not with the mutant."""
    is_slow: bool = False
    """True if checks take seconds each: only the command runs them, not the suite."""

    def __post_init__(self) -> None:
        assert self.tests or self.cells, f"{self.bug}: nothing is named that should catch it"

    def with_one_check(self) -> Mutation:
        """Return the mutation with only its first test, or its first cell if it has no test."""
        return replace(self, tests=self.tests[:1], cells=() if self.tests else self.cells[:1])

    def why_it_does_not_apply(self) -> str:
        """Return the reason why the patch no longer fits the code; empty if it does."""
        try:
            function = find_function(self.target)
            twin_code(function, self.old, self.new)
        except (AssertionError, AttributeError, ImportError, SyntaxError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the target by its mutant within the block, in this process.

        Raises:
            AssertionError: the text is not in the source exactly once: the code has changed, and so must the mutation.
        """
        function = find_function(self.target)
        original = function.__code__
        function.__code__ = twin_code(function, self.old, self.new)
        try:
            yield
        finally:
            function.__code__ = original


def find_function(target: str) -> FunctionType:
    """Return the plain function of ``module:qualified.name``, without decorators."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
    found = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(found, FunctionType), f"{target} is a {type(found).__name__}, which has no code to replace"
    return found


def twin_code(function: FunctionType, old: str, new: str) -> CodeType:
    """Compile the source of a function after one replacement."""
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(old)
    assert count == 1, f"{function.__module__}.{function.__qualname__} has {old!r} {count} times, not once"
    source = source.replace(old, new)
    source = source[_start_of_def(source) :]
    # Free variables, such as the __class__ of a method that calls super(), must exist around the mutant as well.
    free = function.__code__.co_freevars
    if free:
        names = ", ".join(free)
        source = f"def _around({names}):\n{textwrap.indent(source, '    ')}\n    return {function.__name__}\n"
    flags = __future__.annotations.compiler_flag
    module = compile(source, f"<twin of {function.__qualname__}>", "exec", flags=flags, dont_inherit=True)
    code = _code_named(module, function.__name__)
    assert code.co_freevars == free, (code.co_freevars, free)
    return code


def _start_of_def(source: str) -> int:
    """Return the line where the function begins, after its decorators."""
    for keyword in ("def ", "async def "):
        if source.startswith(keyword):
            return 0
    starts = [source.find(f"\n{keyword}") for keyword in ("def ", "async def ")]
    return min(start for start in starts if start >= 0) + 1


def _code_named(code: CodeType, name: str) -> CodeType:
    """Find the code object of a function within another's."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name == name:
                return constant
            if constant.co_name == "_around":
                return _code_named(constant, name)
    raise AssertionError(f"no function {name} in the twin")
