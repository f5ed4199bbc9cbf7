"""Whether Triton is installed: CUDA builds of torch include it, CPU builds do not (SGLang then gets a stub)."""

from __future__ import annotations

from importlib import metadata

import pytest


def _is_installed() -> bool:
    try:
        metadata.version("triton")
    except metadata.PackageNotFoundError:
        return False
    return True


needs_triton = pytest.mark.skipif(
    not _is_installed(), reason="Triton is not installed; tests/gpu runs the same kernels compiled, on a GPU"
)
