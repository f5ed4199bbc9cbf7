"""Let megatron-core run on CPU tensors.  Importing this module is all that needs to be done.

megatron-core 0.16.1 asks ``torch.cuda`` for devices, streams and random states in the middle of plain tensor code.  On
a machine without CUDA the replacements below, each with its reason, answer instead.
They reach only modules of ``megatron.core``, whose global name ``torch`` is exchanged for a facade when they are
imported; the two methods of ``torch.Tensor`` are the exception.  On a machine with CUDA only MKL is initialized here.

Every module of ours that imports ``megatron.core`` imports this one first; a test holds that order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils import megatron_wheel
from slime.utils.errors import ConfigError

SUPPORTED_VERSION = "0.16.1"
"""The only megatron-core that the replacements were tested with."""

CPU = torch.device("cpu")

_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
)
"""Called with device literals (optimizer/clip_grads.py), or with pin_memory, which needs a CUDA context."""


def of_new_parameters(config: Any) -> dict[str, Any]:
    """Return dtype and device of the parameters that a TransformerConfig asks for, as tensor factories take them."""
    return {
        "dtype": config.params_dtype,
        "device": CPU if config.use_cpu_initialization else torch.cuda.current_device(),
    }


class _NoStream:
    """A stream or an event on a device that has neither: every method returns at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    __hash__ = object.__hash__


class _TypeName(str):
    """``'torch.FloatTensor'``, equal to ``'torch.cuda.FloatTensor'`` as well."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or str.__eq__(self.replace("torch.", "torch.cuda.", 1), other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class _Facade(types.ModuleType):
    """A module whose own attributes come first and whose others are those of ``original``."""

    def __init__(self, original: types.ModuleType, **own: Any) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(own, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``factory``: device='cuda' means the CPU, and pin_memory is ignored."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return on_cpu


def _torch_facade() -> _Facade:
    """Return ``torch`` as modules of megatron.core see it."""
    stream = _NoStream()
    cuda = _Facade(
        torch.cuda,
        current_device=lambda: CPU,  # is passed on as device= to tensor factories
        device_count=lambda: 1,  # numbers local ranks
        get_device_capability=lambda *args: (0, 0),  # is compared to choose a CUDA kernel
        set_device=lambda device: None,
        synchronize=lambda *args: None,
        empty_cache=lambda: None,
        Stream=_NoStream,
        Event=_NoStream,
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        set_stream=lambda *args: None,
        stream=lambda *args: contextlib.nullcontext(),
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _Facade(torch, cuda=cuda, **factories)


def _patch_jit(module: types.ModuleType) -> None:
    """Fuse nothing: torch.compile needs a C++ compiler on a CPU and gains nothing here."""
    module.jit_fuser = module.noop_decorator  # type: ignore[attr-defined]


def _patch_random(module: types.ModuleType) -> None:
    """Take the CPU generator for dropout and for the recomputation of parallel regions."""

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    module._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    module._set_cuda_rng_state = set_state  # type: ignore[attr-defined]


def _patch_moe_utils(module: types.ModuleType) -> None:
    """Turn CPU tensors into arrays too: all_to_all needs its split sizes as plain integers."""

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = to_host  # type: ignore[attr-defined]


def _all_gather(parts: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
    """Run ``torch.distributed.all_gather`` on tensors whose first dimensions may differ, as those of ``parts`` do."""
    longest = max(part.size(0) for part in parts)
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: tensor.size(0)] = tensor
    gathered = [torch.empty_like(padded) for _ in parts]
    torch.distributed.all_gather(gathered, padded, group=group)
    for part, received in zip(parts, gathered, strict=True):
        part.copy_(received[: part.size(0)])


def _reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], group: Any = None) -> None:
    """Run ``torch.distributed.reduce_scatter`` on parts whose first dimensions may differ."""
    longest = max(part.size(0) for part in parts)
    padded = output.new_zeros(len(parts), longest, *output.shape[1:])
    for row, part in zip(padded, parts, strict=True):
        row[: part.size(0)] = part
    received = torch.empty_like(padded[0])
    torch.distributed.reduce_scatter_tensor(received, padded.flatten(0, 1), group=group)
    output.copy_(received[: output.size(0)])


def _patch_mappings(module: types.ModuleType) -> None:
    """Let parts differ in size, as experts cut by tensor parallelism do: gloo refuses that."""
    distributed = _Facade(torch.distributed, all_gather=_all_gather, reduce_scatter=_reduce_scatter)
    vars(module)["torch"] = _Facade(module.torch, distributed=distributed)


_MODULE_PATCHES: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core.jit": _patch_jit,
    "megatron.core.tensor_parallel.mappings": _patch_mappings,
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.transformer.moe.moe_utils": _patch_moe_utils,
}


def _patch_tensor_methods() -> None:
    """Replace the two methods that cannot be confined to megatron.core.

    Optimizers compare ``type()`` with 'torch.cuda.FloatTensor'; rope_utils.py and dist_checkpointing call ``cuda()``.
    """
    original_type = torch.Tensor.type

    @functools.wraps(original_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        return _TypeName(result) if isinstance(result, str) else result

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


@contextlib.contextmanager
def _without_wandb() -> Iterator[None]:
    """Have ``import wandb`` fail unless it is loaded: for type hints of its inference, megatron-core would load it."""
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["wandb"]


class _Finder(importlib.abc.MetaPathFinder):
    """An import hook that puts the facade into each module of megatron.core as soon as its body has run."""

    def __init__(self, facade: _Facade, wheel_folder: Path | None) -> None:
        self.facade = facade
        self.wheel_folder = wheel_folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        if fullname == "megatron.core" and self.wheel_folder is not None:
            path = [str(self.wheel_folder)]
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        run_body = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            with warnings.catch_warnings(), _without_wandb():
                # Each module warns that TransformerEngine and Apex are absent, which is the plan here.
                warnings.simplefilter("ignore")
                run_body(module)
            self.adapt(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def adapt(self, module: types.ModuleType) -> None:
        """Exchange the module's ``torch`` and replace the functions listed for it."""
        if module.__dict__.get("torch") is torch:
            module.torch = self.facade  # type: ignore[attr-defined]
        if module.__name__ in _MODULE_PATCHES:
            _MODULE_PATCHES[module.__name__](module)


def _check_version() -> None:
    """Raise ConfigError unless the installed megatron-core is the tested one."""
    wheel = megatron_wheel.find_wheel()
    if wheel is None:
        raise ConfigError(
            f"megatron-core is not installed; training needs it; pip install megatron-core=={SUPPORTED_VERSION}."
        )
    found = wheel.version
    if found != SUPPORTED_VERSION:
        raise ConfigError(
            f"megatron-core is {found}; without CUDA it runs through replacements tested with {SUPPORTED_VERSION} "
            f"(slime/backends/megatron_utils/cpu_platform.py); pip install megatron-core=={SUPPORTED_VERSION}."
        )


def _initialize_vector_math() -> None:
    """Make this process's first call of MKL's vector functions (sqrt, exp, log, cos, ...) in one thread.

    MKL detects the processor in that call.  When two threads make it at once, one may compute its part with the least
    accurate code: errors up to 2e-4, in one process of 30 to 250 with torch 2.13 and MKL 2024.2.
    """
    torch.ones(1).sqrt()


def install() -> bool:
    """Put the replacements in place; True when they are (there is no CUDA), False when nothing was touched.

    Raises:
        ConfigError: megatron-core is missing or of another version, or was imported before this module.
    """
    wheel_folder = megatron_wheel.pin()
    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    _check_version()
    if "megatron.core" in sys.modules:
        raise ConfigError(
            "megatron.core was imported before slime.backends.megatron_utils.cpu_platform, too late to run it without "
            "CUDA; in the module that imports megatron.core, import cpu_platform above it."
        )
    _patch_tensor_methods()
    sys.meta_path.insert(0, _Finder(_torch_facade(), wheel_folder))
    return True


_initialize_vector_math()
IS_INSTALLED = install()
"""True on a machine without CUDA, after the replacements are in place."""
