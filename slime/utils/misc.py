"""Small utilities without a better home.  Plug-in authors import them."""

from __future__ import annotations

import base64
import binascii
import copy
import functools
import inspect
import json
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import orjson
import torch
from torch import Tensor

from slime.utils.errors import DataError, HookError
from slime.utils.net import get_current_node_ip, get_free_port
from slime.utils.plugins import PluginCall, call_plugin, import_plugin
from slime.utils.redaction import redacted_text

__all__ = [
    "Box",
    "SingletonMeta",
    "accepted",
    "call_hook",
    "copy_plain",
    "decode_int32",
    "decode_int32_meta_array",
    "decode_json",
    "exec_command",
    "get_current_node_ip",
    "get_free_port",
    "group_by",
    "load_function",
    "parameters_of",
    "should_run_periodic_action",
]

T = TypeVar("T")


@functools.cache
def load_function(path: str) -> Any:
    """Import the attribute named by a path such as ``my_package.my_module.my_function``.

    Raises:
        HookError: the path has no dot, its module cannot be imported, or the module has no such attribute.
    """
    module_path, dot, name = path.rpartition(".")
    if not dot or ":" in path or "/" in path:
        raise HookError(f"{path!r} is not an import path; write package.module.attribute, with dots only.")
    module = import_plugin(module_path, repr(path))
    try:
        return getattr(module, name)
    except AttributeError as error:
        where = f"{module_path} ({getattr(module, '__file__', None)})"
        raise HookError(f"{path!r} cannot be loaded: {where} has no attribute {name!r}.") from error


def call_hook(flag: str, path: str, *args: Any, **kwargs: Any) -> Any:
    """Call the function at import ``path``, the value of ``flag``; see ``slime.utils.plugins.call_plugin``."""
    return call_plugin(PluginCall(flag, path), load_function(path), *args, **kwargs)


@functools.lru_cache(maxsize=256)
def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a plug-in's function by name; cached, because every sample needs them."""
    return inspect.signature(function).parameters


def accepted(function: Callable[..., Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``facts`` that a plug-in's function has parameters for; all if it takes ``**kwargs``."""
    parameters = parameters_of(function)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(facts)
    return {name: value for name, value in facts.items() if name in parameters}


_IMMUTABLE = frozenset({int, float, bool, str, bytes, complex, type(None)})


def copy_plain(value: T, memo: dict[int, Any] | None = None) -> T:
    """Copy like ``copy.deepcopy``, but fast for JSON-like values: sampling parameters, metadata, token ids.

    A list of immutable values costs only a type check per item; other objects are copied with ``copy.deepcopy``.  A
    list or dict that occurs twice is copied twice.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        return {key: copy_plain(item, memo) for key, item in value.items()}  # type: ignore[attr-defined,return-value]
    if kind is list:
        if _IMMUTABLE.issuperset(map(type, value)):  # type: ignore[call-overload]
            return value.copy()  # type: ignore[attr-defined]
        return [copy_plain(item, memo) for item in value]  # type: ignore[attr-defined,return-value]
    return copy.deepcopy(value, memo)


class SingletonMeta(type):
    """Metaclass for one instance per process: later constructions return the first instance, ignoring arguments."""

    _instances: dict[type, Any] = {}
    _lock = threading.RLock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._instances:
                SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
            return SingletonMeta._instances[cls]

    def clear_instances(cls) -> None:
        """Drop the instance, so that the next construction makes a new one."""
        with SingletonMeta._lock:
            SingletonMeta._instances.pop(cls, None)


class Box:
    """Wraps a value to pass it through a layer that would otherwise resolve it, as Ray resolves bare references."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def inner(self) -> Any:
        return self._inner


def group_by(iterable: Iterable[T], key: Callable[[T], Any] | None = None) -> dict[Any, list[T]]:
    """Group items by ``key(item)`` (the item itself by default), groups and items in order of appearance."""
    groups: dict[Any, list[T]] = {}
    for item in iterable:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a shell command without a deadline (it may be a whole training run); return stdout if ``capture_output``.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    print(f"EXEC: {redacted_text(cmd)}", flush=True)
    done = subprocess.run(["bash", "-c", cmd], check=True, capture_output=capture_output, text=capture_output)
    return done.stdout if capture_output else None


def should_run_periodic_action(
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
) -> bool:
    """Return True if an action due every ``interval`` rollouts is due after ``rollout_id`` (counted from 0).

    It is also due at the end of an epoch and, if ``num_rollout`` is given, after the last rollout.  Epochs shorter
    than a rollout (``num_rollout_per_epoch`` 0) do not count.
    """
    if interval is None:
        return False
    if num_rollout is not None and rollout_id == num_rollout - 1:
        return True
    step = rollout_id + 1
    return step % interval == 0 or bool(num_rollout_per_epoch and step % num_rollout_per_epoch == 0)


def decode_json(body: bytes) -> Any:
    """Decode a JSON text; return the text itself if it is not JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        text = body.decode(errors="replace")
    try:
        return json.loads(text)  # accepts NaN and Infinity, which orjson refuses
    except json.JSONDecodeError:
        return text


def decode_int32(value: Any, name: str = "array") -> np.ndarray:
    """Return a flat int32 array from base64 text, raw bytes, a list, an array or a tensor.

    Raises:
        DataError: it is something else, or its values are not 32-bit integers.
    """
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataError(f"meta_info[{name!r}] is a string that is not base64: {error}.") from error
    if isinstance(value, (bytes, bytearray, memoryview)):
        raw = bytes(value)
        if len(raw) % 4:
            raise DataError(f"meta_info[{name!r}] has {len(raw)} bytes; int32 values need a multiple of 4.")
        return np.frombuffer(raw, dtype="<i4").astype(np.int32)  # a copy: frombuffer is read-only
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    try:
        numbers = np.array(value)
    except ValueError:  # lists of different lengths
        numbers = np.array(None)
    limits = np.iinfo(np.int32)
    if numbers.size and (numbers.dtype.kind not in "iu" or numbers.min() < limits.min or numbers.max() > limits.max):
        raise DataError(f"meta_info[{name!r}] is {str(value)[:200]}; it must hold whole numbers of 32 bits.")
    return numbers.astype(np.int32).reshape(-1)


def decode_int32_meta_array(meta: Mapping[str, Any], keys: str | Sequence[str]) -> Tensor | None:
    """Return the flat int32 tensor under the first of ``keys`` with a value in ``meta``, or None."""
    for key in [keys] if isinstance(keys, str) else keys:
        if meta.get(key) is not None:
            return torch.from_numpy(decode_int32(meta[key], key))
    return None
