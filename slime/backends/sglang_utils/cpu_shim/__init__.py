"""A shim for SGLang on a machine without CUDA: names that it imports from packages for GPUs only.

SGLang imports ``sgl_kernel`` (CUDA kernels; no CPU wheel exists), ``triton`` and, where it is not installed,
``torchvision`` at the top of its modules.  A model on a CPU calls few of their functions: SGLang takes its native
torch path.  So the shim supplies *names*: each imports, and raises NotImplementedError when something calls it.  More
than names are ``delta_nets``, and ``native_layers``, for latent attention and adapters.  No file of SGLang is changed,
a package that is installed and works is left alone, and nothing happens on a machine with CUDA.

Three ways in, for three kinds of process:

* :func:`install` for this process, before the first ``import sglang``;
* :func:`child_environment` for a process whose first lines are not ours (it puts this folder on ``PYTHONPATH``, where
  ``sitecustomize.py`` waits for the first ``import sglang``);
* the engine's own processes call :func:`install` in ``server_main``.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from slime.utils import env
from slime.utils.errors import ConfigError
from slime.utils.torchvision_package import import_torchvision, tell_transformers

TESTED_SGLANG = "0.5.15.post1"
"""The only version whose imports the shim is known to satisfy."""

ENGINE_ENVIRONMENT = {
    # Makes SGLang take the native torch path of every layer.
    "SGLANG_USE_CPU_ENGINE": "1",
    # A small model is slower with more threads: 60 tokens/s with two against 3,000 with one, on two cores.
    "OMP_NUM_THREADS": "1",
    # Of what the convolutions of delta nets keep; by default bf16, whatever the model has.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}

_finder: StubFinder | None = None


def is_needed() -> bool:
    """Return True on a machine without a CUDA (or ROCm) device that torch can use."""
    import torch

    return not torch.cuda.is_available()


def install() -> bool:
    """Make ``import sglang`` work in this process; True when the shim is active.

    Calling it again does nothing.  Call it before ``sglang`` is imported; ``transformers`` may be imported already.

    Raises:
        ConfigError: the installed SGLang is not the version that the shim was tested with.
    """
    global _finder  # one import hook per process, whoever asks first
    if _finder is not None:
        return True
    if not is_needed():
        return False
    _check_version()
    stubbed = {"sgl_kernel"} if not _is_installed("sgl_kernel") else set()
    if not import_torchvision():
        stubbed.add("torchvision")
    _finder = StubFinder(frozenset(stubbed))
    sys.meta_path.insert(0, _finder)
    env.export({name: value for name, value in ENGINE_ENVIRONMENT.items() if name == "SGLANG_USE_CPU_ENGINE"})
    if "sgl_kernel" in stubbed:
        _install_delta_nets()
    if "torchvision" in stubbed:
        tell_transformers()
    if not _is_installed("triton"):
        _install_triton_stub()
    return True


def ignore_pinning() -> None:
    """Let what asks for pinned memory get plain memory in this process; with CUDA nothing happens.

    SGLang pins, whatever the device, where it keeps the experts that it chose (``enable_return_routed_experts``) and
    its adapters; torch without an accelerator has no such memory and raises.
    """
    import torch

    if not is_needed():
        return

    def without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def plain(*values: Any, **options: Any) -> torch.Tensor:
            options.pop("pin_memory", None)
            return make(*values, **options)

        return plain

    for name in ("zeros", "empty", "tensor"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def fork_processes(after_fork: Callable[[], object]) -> None:
    """Have ``multiprocessing`` fork in this process, and call ``after_fork`` in each child; with CUDA nothing happens.

    SGLang asks for spawn, because CUDA does not survive a fork.  Without CUDA a fork spares each of its processes
    about ten seconds of imports.
    """
    if not is_needed():
        return
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force=False: None
    os.register_at_fork(after_in_child=after_fork)


def child_environment() -> dict[str, str]:
    """Return variables for a child process that imports SGLang and does not call :func:`install`; {} with CUDA."""
    if not is_needed():
        return {}
    here = str(Path(__file__).parent)
    root = str(Path(__file__).parents[4])
    inherited = [p for p in (env.get_str("PYTHONPATH") or "").split(os.pathsep) if p and p not in (here, root)]
    return {**ENGINE_ENVIRONMENT, "PYTHONPATH": os.pathsep.join([here, root, *inherited])}


def _check_version() -> None:
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"SGLang is not installed; slime on a CPU runs with sglang=={TESTED_SGLANG}: install the cpu extra"
        ) from error
    if version != TESTED_SGLANG:
        raise ConfigError(
            f"sglang {version} is installed, but the shim that lets SGLang run without CUDA is only known to fit "
            f"{TESTED_SGLANG}; install sglang=={TESTED_SGLANG} (the cpu extra), or use a machine with CUDA"
        )


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def _install_delta_nets() -> None:
    """Put the operators of ``delta_nets`` where SGLang looks for those of ``sgl_kernel``."""
    import torch

    from slime.backends.sglang_utils.cpu_shim import delta_nets

    module = StubModule("sgl_kernel.mamba")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel.mamba", None, is_package=True)
    vars(module).update(delta_nets.MODULE)
    sys.modules["sgl_kernel.mamba"] = module
    for name, operator in delta_nets.OPERATORS.items():
        setattr(torch.ops.sgl_kernel, name, operator)


def _install_triton_stub() -> None:
    """Load SGLang's substitute for triton, which it uses on macOS, without importing sglang.

    torch asks for triton as well and must hear the truth: it looks once and remembers, so it looks first.
    """
    from torch._inductor.runtime import triton_compat  # noqa: F401
    from torch.utils._triton import has_triton_package

    has_triton_package()
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the package sglang=={TESTED_SGLANG} cannot be found; install the cpu extra")
    path = Path(next(iter(spec.submodule_search_locations))) / "_triton_stub.py"
    stub_spec = importlib.util.spec_from_file_location("_sglang_triton_stub", path)
    if stub_spec is None or stub_spec.loader is None:
        raise ConfigError(f"{path} is missing; reinstall sglang=={TESTED_SGLANG}, or install triton")
    stub: ModuleType = importlib.util.module_from_spec(stub_spec)
    stub_spec.loader.exec_module(stub)
    stub.install()


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

    __getattr__ = NameStub.__getattr__


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
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stub has no code to run."""
