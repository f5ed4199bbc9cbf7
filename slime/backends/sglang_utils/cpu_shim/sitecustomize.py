"""Runs at the start of every Python process that has this folder on PYTHONPATH: waits for ``import sglang``.

Nothing is imported until then, so that processes which never use SGLang start as fast as before.
"""

import importlib.abc
import sys


class _WaitForSGLang(importlib.abc.MetaPathFinder):
    """Installs the shim when sglang is first imported, and steps aside."""

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname == "sglang":
            sys.meta_path.remove(self)
            from slime.backends.sglang_utils import cpu_shim

            cpu_shim.install()
        return None


sys.meta_path.insert(0, _WaitForSGLang())
