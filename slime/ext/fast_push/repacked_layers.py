"""Layers whose weights SGLang repacks for its kernels after a load, taken apart for a push and repacked after it.

The *loaded form* of a layer has the parameters that a checkpoint fills; the *served form* has what kernels read: tiles
of packed integers, FP8 transposed or rounded to one scale.  SGLang goes from one to the other once, and a loader finds
no place for a checkpoint's tensors afterwards.

    watch_repacking   notes the loaded form of every layer that SGLang repacks when it starts
    unpack            gives the model its loaded form, in the memory of the served one wherever that has room
    repack            runs SGLang's own step on it, and writes what that makes to where CUDA graphs read it

A layer is proven as soon as it is watched, before anything is served: unpacked, filled with what was loaded and
repacked it must hold what SGLang's first repacking made, bit for bit.  Of a model with a layer that does not, every
push is refused.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slime.backends.sglang_utils.sglang_plugin import is_own_scale
from slime.ext.fast_push.weight_check import NAN_BYTE
from slime.utils.errors import WeightSyncError

logger = logging.getLogger(__name__)

_STEP = "process_weights_after_loading"
_LAYERS = "_slime_repacked_layers"
"""Attribute of a model: its :class:`RepackedLayer` s."""
MAX_MORE = 1 / 8
"""Of a layer's bytes, how many more its loaded form may take: for scales, not for the weights of a wider dtype."""
_PUSHED = ("fp8", "compressed_tensors")
"""SGLang's names of the formats that a push can have."""
_PARTS = ("quant_method", "scheme")
"""Attributes of a layer that SGLang's step may change too."""


@dataclass(frozen=True)
class _Form:
    """A parameter as a loader knows it, without its memory."""

    kind: type[nn.Parameter]
    attributes: Mapping[str, Any]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Form:
        return cls(type(parameter), {**vars(parameter)}, parameter.shape, parameter.stride(), parameter.dtype)

    def is_of(self, tensor: Tensor | None) -> bool:
        """Return True for a parameter that a loader treats as the one described."""
        return (
            type(tensor) is self.kind
            and (tensor.shape, tensor.stride(), tensor.dtype) == (self.shape, self.stride, self.dtype)
            and self.attributes.keys() <= vars(tensor).keys()
        )

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, data: Tensor) -> nn.Parameter:
        parameter: nn.Parameter = torch.Tensor._make_subclass(self.kind, data, False)
        vars(parameter).update(self.attributes)
        return parameter

    def within(self, served: Tensor | None) -> Tensor | None:
        """Return the memory of ``served``, seen as this parameter; None if it has not just as many bytes."""
        if served is None or served.nbytes != self.num_bytes or not _is_dense(served):
            return None
        offset, rest = divmod(int(served.storage_offset()) * served.element_size(), self.dtype.itemsize)
        empty = torch.empty(0, dtype=self.dtype, device=served.device)
        return None if rest else empty.set_(served.untyped_storage(), offset, self.shape, self.stride)


class RepackedLayer:
    """One layer in either form.

    Args:
        blank: a copy from before SGLang's step, without parameters.
        forms: of the parameters before that step; None for one that is None.
    """

    def __init__(self, name: str, layer: nn.Module, blank: nn.Module, forms: Mapping[str, _Form | None]) -> None:
        self.name, self._layer, self._blank, self._forms = name, layer, blank, forms
        self.problem = ""
        """Why the layer cannot be repacked again; empty when it is proven."""
        self._own: dict[str, Tensor] = {}
        """Memory of the loaded form that has no room in the served one, kept so that its addresses stay."""
        self._served: dict[str, nn.Parameter | None] | None = None
        """The served parameters while the layer is unpacked."""

    @property
    def is_unpacked(self) -> bool:
        """The layer has its loaded form and must not serve."""
        return self._served is not None

    def unpack(self) -> None:
        """Give the layer its loaded form; what that holds is undefined."""
        if self._served is not None:
            return
        served = self._served = {**self._layer._parameters}
        loaded: dict[str, nn.Parameter | None] = {}
        for name, form in self._forms.items():
            place = None if form is None else self._place(form, served.get(name))
            loaded[name] = place if form is None or place is not None else form.make(self._own_memory(name, form))
        self._show(loaded)

    @staticmethod
    def _place(form: _Form, served: nn.Parameter | None) -> nn.Parameter | None:
        """Return the parameter to load to, in the memory of the served one; None where that has no room for it."""
        if served is not None and (form.is_of(served) or not served.numel()):
            return served  # what SGLang's step leaves empty is no part of a checkpoint
        data = form.within(served)
        return None if data is None else form.make(data)

    def _own_memory(self, name: str, form: _Form) -> Tensor:
        if name not in self._own:
            device = next(p.device for p in self._layer.parameters(recurse=False))
            self._own[name] = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=device)
        data = self._own[name]
        every_byte = torch.empty(0, dtype=torch.uint8, device=data.device).set_(data.untyped_storage())
        every_byte.fill_(NAN_BYTE)  # what no tensor fills must not look like the last push
        return data

    def repack(self) -> None:
        """Give the layer its served form again, of what its loaded form holds.

        Raises:
            WeightSyncError: SGLang's step makes other tensors than it made at first.
        """
        if self._served is None:
            return
        copied, served = _copy_of(self._blank), self._served
        for name, parameter in self._layer._parameters.items():
            form = self._forms[name]
            copied._parameters[name] = form.make(parameter.data) if form and parameter is not None else None
        getattr(copied.quant_method, _STEP)(copied)
        made, held = _numbers(copied), _numbers(self._layer)
        if made != held:
            names = ", ".join(sorted(name for name in made.keys() | held.keys() if made.get(name) != held.get(name)))
            raise WeightSyncError(f"{self.name} keeps {names} outside of tensors, which a push cannot change")
        _write(_tensors(copied, copied._parameters), _tensors(self._layer, served))
        self._show(served)
        self._served = None

    def _show(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        shown = self._layer._parameters
        shown.clear()
        shown.update(parameters)

    def prove(self, loaded: Mapping[str, Tensor]) -> None:
        """Repack the layer again from what was loaded, and note in :attr:`problem` how it is not as before."""
        served = {**self._layer._parameters}
        forms = ((form, served.get(name)) for name, form in self._forms.items() if form is not None)
        more = sum(form.num_bytes for form, parameter in forms if self._place(form, parameter) is None)
        if more > MAX_MORE * sum(tensor.nbytes for tensor in loaded.values()):
            self.problem = f"it needs {more} bytes beside those that it serves from to be loaded"
            return
        held = _tensors(self._layer, served)
        expected = {name: tensor.clone() for name, tensor in held.items()}
        older = {tensor.data_ptr() for tensor in _tensors(self._blank, {}).values()}
        for tensor in held.values():
            if tensor.data_ptr() not in older:
                tensor.zero_()  # what is not made again shall not pass
        try:
            self.unpack()
            for name, parameter in self._layer._parameters.items():
                if parameter is not None and parameter.numel():
                    parameter.data.copy_(loaded[name])
            self.repack()
            wrong = sorted(name for name, tensor in expected.items() if not _are_same(tensor, held[name]))
            if wrong:
                self.problem = f"repacked once more, {', '.join(wrong)} are not what they were"
        except Exception as error:  # whatever SGLang's step raises; the engine serves, and refuses pushes
            self.problem = f"{type(error).__name__}: {error}"
        if self.problem:
            self._served = None
            self._show(served)
            _write(expected, held)


def watch_repacking(model: nn.Module) -> None:
    """Note and prove every layer of a fresh model whose quantized weights SGLang will repack."""
    found: list[RepackedLayer] = []
    vars(model)[_LAYERS] = found
    names = {module: name for name, module in model.named_modules()}
    for method in {getattr(module, "quant_method", None) for module in names}:
        config = getattr(method, "quant_config", None)
        if config is not None and config.get_name() in _PUSHED:
            vars(method)[_STEP] = functools.partial(_watched_step, getattr(method, _STEP), found, names)


def _watched_step(
    original: Callable[[nn.Module], None], found: list[RepackedLayer], names: dict[nn.Module, str], layer: nn.Module
) -> None:
    """Do what ``original`` does with a layer, the first time under watch."""
    name = names.pop(layer, None)
    if name is None:
        original(layer)
        return
    blank, before = _copy_of(layer), {**layer._parameters}
    forms = {key: None if p is None else _Form.of(p) for key, p in before.items()}
    loaded = {key: p.data.clone() for key, p in before.items() if p is not None}
    original(layer)
    changed = [
        key for key, tensor in loaded.items() if not _is_unchanged(forms[key], tensor, layer._parameters.get(key))
    ]
    if all(map(is_own_scale, changed)):
        return
    watched = RepackedLayer(name, layer, blank, forms)
    if any(map(is_own_scale, changed)):
        watched.problem = "scales of activations are among what it repacks, and no push brings them"
    else:
        watched.prove(loaded)
    if watched.problem and not any(one.problem for one in found):
        logger.warning("%s is repacked for SGLang's kernels; this engine takes no push: %s", name, watched.problem)
    found.append(watched)


def _is_unchanged(form: _Form | None, loaded: Tensor, served: nn.Parameter | None) -> bool:
    return form is not None and served is not None and form.is_of(served) and _are_same(loaded, served.data)


def reload(original: Callable[..., None], model: nn.Module, weights: Any, target_device: torch.device) -> None:
    """Load a checkpoint in place of SGLang's own function, which knows unpacked models alone."""
    if not _layers(model) or refusal(model):
        original(model, weights, target_device)
        return
    unpack(model)
    model.load_weights(weights)  # type: ignore[operator]
    repack(model)


def unpack(model: nn.Module) -> None:
    """Give all repacked layers of a model their loaded form.

    Raises:
        WeightSyncError: one of them could not be repacked again.
    """
    if found := refusal(model):
        raise WeightSyncError(found)
    for layer in _layers(model):
        layer.unpack()


def repack(model: nn.Module) -> None:
    """Give all layers their served form again.

    Raises:
        WeightSyncError: SGLang's step makes other tensors than it made at first.
    """
    with torch.no_grad():
        for layer in _layers(model):
            layer.repack()


def has_repacked_layers(model: nn.Module) -> bool:
    """Return True for a model that SGLang repacks."""
    return bool(_layers(model))


def is_unpacked(model: nn.Module) -> bool:
    """Return True for a model that must be repacked before it serves."""
    return any(layer.is_unpacked for layer in _layers(model))


def refusal(model: nn.Module) -> str:
    """Return why the model takes no push; empty when it does."""
    refused = [layer for layer in _layers(model) if layer.problem]
    if not refused:
        return ""
    return (
        f"SGLang has repacked {len(refused)} layers for its kernels and cannot do so again with other weights: "
        f"{refused[0].name}: {refused[0].problem}. Use an --hf-checkpoint in FP8 by blocks "
        "(tools/convert_hf_to_fp8.py), or one that is not quantized"
    )


def _layers(model: nn.Module) -> list[RepackedLayer]:
    layers: list[RepackedLayer] = vars(model).get(_LAYERS, [])
    return layers


# --- a layer's state ----------------------------------------------------------------------------------------------


def _copy_of(layer: nn.Module) -> nn.Module:
    """Return a copy without parameters that SGLang's step can change and the layer itself does not feel."""
    copied = copy.copy(layer)
    state = vars(copied)
    state |= {"_parameters": {}, "_buffers": {**layer._buffers}, "_modules": {**layer._modules}}
    for name in _PARTS:
        if getattr(layer, name, None) is not None:
            part = copy.copy(getattr(layer, name))
            vars(part).pop(_STEP, None)
            setattr(copied, name, part)
    return copied


def _parts(layer: nn.Module, parameters: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", {**vars(layer), **layer._buffers, **parameters}
    for name in _PARTS:
        if getattr(layer, name, None) is not None:
            yield f"{name}.", vars(getattr(layer, name))


def _tensors(layer: nn.Module, parameters: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return all tensors of a layer with these parameters, of its quantization method and scheme, by name."""
    return {
        f"{part}{name}": value.data
        for part, state in _parts(layer, parameters)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _numbers(layer: nn.Module) -> dict[str, float]:
    return {f"{part}{n}": v for part, state in _parts(layer, {}) for n, v in state.items() if isinstance(v, float)}


def _write(made: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Copy tensors to where those of the same names lie.

    Raises:
        WeightSyncError: they do not match.
    """
    owned = {tensor.untyped_storage().data_ptr() for tensor in held.values()}
    ready = {}
    for name, tensor in held.items():
        new = made.get(name)
        if new is None or (new.shape, new.dtype) != (tensor.shape, tensor.dtype):
            what = "nothing" if new is None else f"{list(new.shape)} of {new.dtype}"
            raise WeightSyncError(f"{name} is {list(tensor.shape)} of {tensor.dtype}, and was made as {what}")
        if (new.data_ptr(), new.stride()) != (tensor.data_ptr(), tensor.stride()):
            ready[name] = new.clone() if new.untyped_storage().data_ptr() in owned else new
    for name, new in ready.items():
        held[name].copy_(new)


def _is_dense(tensor: Tensor) -> bool:
    """Return True when the elements fill a stretch of memory."""
    return (
        1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) == tensor.numel()
    )


def _are_same(first: Tensor, second: Tensor) -> bool:
    """Compare two tensors bit for bit."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (first, second)))
