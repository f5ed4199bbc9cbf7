"""Modules whose every name exists and does nothing until it is called.  See the package's docstring for why."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn


class NameStub:
    """A name that imports: attributes give further stubs, a call raises, and as a base class it disappears."""

    def __init__(self, dotted_name: str) -> None:
        self.__name__ = dotted_name

    def __getattr__(self, name: str) -> NameStub:
        if name.startswith("__"):
            raise AttributeError(name)
        return NameStub(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{self.__name__} was called, but this machine has no CUDA and only the name exists here (slime's CPU "
            "shim for SGLang); image models and GPU kernels need the real package"
        )

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return ()

    def __repr__(self) -> str:
        return f"<name stub {self.__name__}>"


class StubModule(ModuleType):
    """A package without a file; its attributes are :class:`NameStub`."""

    __path__: list[str] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NameStub(f"{self.__name__}.{name}")


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for the given top-level packages and everything below them."""

    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a stubbed package or submodule; None for every other name."""
        if fullname.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return an empty stub module."""
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stub has no code to run."""
