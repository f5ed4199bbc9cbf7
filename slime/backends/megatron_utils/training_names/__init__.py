"""``megatron.training`` for plug-ins: model providers written for Megatron-LM call its ``get_args()``.

If a Megatron-LM checkout is on PYTHONPATH, the package is the checkout's; otherwise it is this folder, which has the
few names that providers import.  Either way ``get_args()`` returns the arguments passed to ``share_args``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent
_PACKAGE, _ARGS_MODULE = "megatron.training", "megatron.training.global_vars"


class _Finder(importlib.abc.MetaPathFinder):
    """An import hook that finds ``megatron.training``, and sets its arguments once the module has loaded."""

    args: Namespace | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in (_PACKAGE, _ARGS_MODULE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if fullname == _PACKAGE:
            file, folders = _FOLDER / "package.py", [str(_FOLDER)]
            return spec or importlib.util.spec_from_file_location(_PACKAGE, file, submodule_search_locations=folders)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            run_body = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run_body(module)
                if self.args is not None:
                    module.set_args(self.args)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def share_args(args: Namespace) -> None:
    """Make ``megatron.training.get_args()`` return ``args``, even if the package is imported later."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.args = args
    if module := sys.modules.get(_ARGS_MODULE):
        module.set_args(args)
