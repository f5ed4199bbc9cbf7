"""Makes ``megatron.core`` import from the installed wheel, and run on CPU tensors.

The package ``megatron_utils`` imports this module before slime imports megatron-core anywhere.

Recipes put a checkout of Megatron-LM on PYTHONPATH.  ``megatron`` is a namespace package, so the checkout's
``megatron/core``, another version, would be imported instead of the wheel's.  Other modules of a checkout, such as
``megatron.training``, stay importable for plug-ins.

megatron-core 0.16.1 uses ``torch.cuda`` for devices, streams and random states in the middle of plain tensor code.
Without CUDA, the replacements below answer instead; each states its reason.
They apply only to modules of ``megatron.core``, whose global name ``torch`` is replaced by a facade when they are
imported; the two methods of ``torch.Tensor`` are the exception.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from slime.utils.errors import ConfigError

logger = logging.getLogger(__name__)

SUPPORTED_VERSION = "0.16.1"
"""The only megatron-core that the replacements were tested with."""

CPU = torch.device("cpu")

_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
)
"""megatron-core calls these with device literals (optimizer/clip_grads.py), or with pin_memory, which needs CUDA."""


def of_new_parameters(config: Any) -> dict[str, Any]:
    """Return the dtype and device of new parameters under a TransformerConfig, as arguments of tensor factories."""
    return {
        "dtype": config.params_dtype,
        "device": CPU if config.use_cpu_initialization else torch.cuda.current_device(),
    }


class _NoStream:
    """Stands in for a CUDA stream or event: every method does nothing."""

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
    """A module that replaces some attributes of ``original`` and passes on all others."""

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
        current_device=lambda: CPU,  # passed to tensor factories as device=
        device_count=lambda: 1,  # used to number local ranks
        get_device_capability=lambda *args: (0, 0),  # compared to choose a CUDA kernel
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
    """Disable fusion: torch.compile needs a C++ compiler on a CPU and gains nothing here."""
    module.jit_fuser = module.noop_decorator  # type: ignore[attr-defined]


def _patch_random(module: types.ModuleType) -> None:
    """Use the CPU generator for dropout and for the recomputation of parallel regions."""

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    module._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    module._set_cuda_rng_state = set_state  # type: ignore[attr-defined]


def _patch_moe_utils(module: types.ModuleType) -> None:
    """Convert CPU tensors to numpy arrays as well: all_to_all needs its split sizes as plain integers."""

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = to_host  # type: ignore[attr-defined]


def _all_gather(parts: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
    """Run ``torch.distributed.all_gather`` on tensors whose first dimensions may differ between ranks."""
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
    """Allow parts of different sizes, which occur with tensor-parallel experts and which gloo rejects."""
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
    """Make ``import wandb`` fail unless it is loaded already: megatron-core imports it only for type hints."""
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["wandb"]


class _Finder(importlib.abc.MetaPathFinder):
    """An import hook that imports megatron.core from ``wheel_folder``, and sets ``facade`` as the ``torch`` of each of
    its modules after the module's body has run.  With CUDA there is no facade, and modules stay unchanged.
    """

    def __init__(self, wheel_folder: Path | None, facade: _Facade | None) -> None:
        self.wheel_folder, self.facade = wheel_folder, facade

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "megatron.core":
            self._begin()
            path = path if self.wheel_folder is None else [str(self.wheel_folder)]
        elif self.facade is None or not fullname.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if self.facade is None or spec is None:
            return spec
        if not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        run_body = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            with warnings.catch_warnings(), _without_wandb():
                # Each module warns that TransformerEngine and Apex are missing, which is intended here.
                warnings.simplefilter("ignore")
                run_body(module)
            if module.__dict__.get("torch") is torch:
                module.torch = self.facade  # type: ignore[attr-defined]
            if module.__name__ in _MODULE_PATCHES:
                _MODULE_PATCHES[module.__name__](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _begin(self) -> None:
        if self.facade is not None:
            _patch_tensor_methods()
        for entry in sys.path if self.wheel_folder is not None else ():
            other = Path(entry or ".") / "megatron"
            if other != self.wheel_folder and (other / "core/__init__.py").is_file():
                logger.info(
                    "megatron.core comes from the wheel in %s, not from the checkout in %s.", self.wheel_folder, other
                )


def _find_wheel() -> importlib.metadata.Distribution | None:
    """Return the installed megatron-core; metadata in a source checkout counts only if there is no wheel."""
    found = list(importlib.metadata.distributions(name="megatron-core"))
    wheels = [distribution for distribution in found if distribution.read_text("WHEEL") and _folder(distribution)]
    return next(iter(wheels or found), None)


def _folder(distribution: importlib.metadata.Distribution) -> Path | None:
    """Return ``.../megatron`` of an installed distribution; None for an editable install."""
    folder = Path(str(distribution.locate_file("megatron")))
    return folder if (folder / "core/__init__.py").is_file() else None


def _version_problem() -> str | None:
    wheel = _find_wheel()
    if wheel is None:
        return (
            f"megatron-core is not installed, but training needs it; pip install megatron-core=={SUPPORTED_VERSION}."
        )
    if wheel.version != SUPPORTED_VERSION:
        return (
            f"megatron-core is {wheel.version}; without CUDA it runs through replacements tested with "
            f"{SUPPORTED_VERSION} (slime/backends/megatron_utils/cpu_platform.py); pip install "
            f"megatron-core=={SUPPORTED_VERSION}."
        )
    return None


def _initialize_vector_math() -> None:
    """Make this process's first call of MKL's vector functions (sqrt, exp, log, cos, ...) from a single thread.

    MKL detects the processor in that call.  If two threads make it at once, one may compute its part with the least
    accurate code: errors up to 2e-4, seen in one process of 30 to 250 with torch 2.13 and MKL 2024.2.
    """
    torch.ones(1).sqrt()


def _install() -> tuple[bool, str | None]:
    """Install the import hook.  Return whether CUDA is missing, and the problem a trainer would have in this process.

    The problem is not raised here: flags and rollouts also import this package, in processes where SGLang may already
    have imported another megatron-core.
    """
    wheel = _find_wheel()
    folder = _folder(wheel) if wheel is not None else None
    on_cpu = not torch.cuda.is_available()
    imported = sys.modules.get("megatron.core")
    problem = _version_problem() if on_cpu else None
    if imported is not None and folder is not None and Path(imported.__file__ or "").parent != folder / "core":
        problem = (
            f"megatron.core was imported from {imported.__file__} before slime, which needs the installed wheel in "
            f"{folder}; import slime first, or take the Megatron-LM checkout off PYTHONPATH."
        )
    elif imported is not None and on_cpu:
        problem = (
            "megatron.core was imported before slime.backends.megatron_utils, too late to run it without CUDA; import "
            "slime.backends.megatron_utils first."
        )
    sys.meta_path.insert(0, _Finder(folder, _torch_facade() if on_cpu and problem is None else None))
    return on_cpu, problem


def check() -> None:
    """Raise ConfigError if slime cannot train with this process's megatron-core."""
    if _PROBLEM is not None:
        raise ConfigError(_PROBLEM)


def mend_missing_transformer_engine() -> None:
    """Work around names and defaults of megatron-core 0.16.1 that are broken without TransformerEngine.

    The bugs occur on CPU and CUDA alike; with TransformerEngine installed, nothing changes.
    """
    check()
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # moe_utils.router_gating_linear reads the name even if its import failed: NameError with --moe-router-dtype.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # multi_latent_attention assumes TransformerEngine although its classes are mocks: isinstance() TypeError.
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    # CheckpointWithoutOutput treats its default, False, as a request for fp8 (it compares with None), and then reads
    # TransformerEngine's fp8 state: NameError with --recompute-modules layernorm or moe_act.
    if not hasattr(tensor_parallel_random, "FP8GlobalStateManager"):
        tensor_parallel_random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


_initialize_vector_math()
IS_INSTALLED, _PROBLEM = _install()
"""``IS_INSTALLED``: True on a machine without CUDA."""
