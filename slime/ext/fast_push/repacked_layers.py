"""Unpacks layers whose weights SGLang repacks for its kernels after a load, and repacks them after a push.

The *loaded form* of a layer has the parameters that a checkpoint fills; the *served form* has what kernels read: tiles
of packed integers, or FP8 transposed or rounded to one scale.  SGLang converts once, and afterwards a loader finds no
place for a checkpoint's tensors.

    watch_repacking   records the loaded form of every layer that SGLang repacks at its start
    unpack            puts the model into its loaded form, within the served form's memory wherever it fits
    repack            runs SGLang's own step, and writes the result to where CUDA graphs read it

A layer is tested at once, before anything is served: unpacked, filled with the loaded tensors and repacked, it must
equal the result of SGLang's first repacking bit for bit.  If any layer fails, the model refuses every push.
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
"""Attribute of a model that holds its list of :class:`RepackedLayer`."""
MAX_MORE = 1 / 8
"""Extra memory that a layer's loaded form may take, as a fraction of its bytes: enough for scales, not for weights."""
_PUSHED = ("fp8", "compressed_tensors")
"""SGLang's names of the quantization formats that can be pushed."""
_PARTS = ("quant_method", "scheme")
"""Attributes of a layer that SGLang's step may also change."""


@dataclass(frozen=True)
class _Form:
    """A parameter's properties that a loader depends on, without its memory."""

    kind: type[nn.Parameter]
    attributes: Mapping[str, Any]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Form:
        return cls(type(parameter), {**vars(parameter)}, parameter.shape, parameter.stride(), parameter.dtype)

    def is_of(self, tensor: Tensor | None) -> bool:
        """Return True if a loader treats ``tensor`` like the described parameter."""
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
        """Return a view of ``served`` with this parameter's dtype and shape; None unless the sizes in bytes match."""
        if served is None or served.nbytes != self.num_bytes or not _is_dense(served):
            return None
        offset, rest = divmod(int(served.storage_offset()) * served.element_size(), self.dtype.itemsize)
        empty = torch.empty(0, dtype=self.dtype, device=served.device)
        return None if rest else empty.set_(served.untyped_storage(), offset, self.shape, self.stride)


class RepackedLayer:
    """One layer that switches between the two forms.

    Args:
        name: the layer's name in the model.
        layer: the layer, in served form.
        blank: a copy of the layer from before SGLang's step, without parameters.
        forms: the parameters' properties before that step; None for a parameter that is None.
    """

    def __init__(self, name: str, layer: nn.Module, blank: nn.Module, forms: Mapping[str, _Form | None]) -> None:
        self.name, self._layer, self._blank, self._forms = name, layer, blank, forms
        self.problem = ""
        """Why the layer cannot be repacked again; empty if it can."""
        self._own: dict[str, Tensor] = {}
        """Memory of loaded parameters that do not fit the served form's memory; kept so that addresses are stable."""
        self._served: dict[str, nn.Parameter | None] | None = None
        """The served parameters while the layer is unpacked."""

    @property
    def is_unpacked(self) -> bool:
        """True if the layer is in its loaded form and must not serve."""
        return self._served is not None

    def unpack(self) -> None:
        """Switch the layer to its loaded form, with undefined content."""
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
        """Return the parameter to load into, within the served one's memory; None if it does not fit."""
        if served is not None and (form.is_of(served) or not served.numel()):
            return served  # parameters that SGLang's step empties are not in a checkpoint
        data = form.within(served)
        return None if data is None else form.make(data)

    def _own_memory(self, name: str, form: _Form) -> Tensor:
        if name not in self._own:
            device = next(p.device for p in self._layer.parameters(recurse=False))
            self._own[name] = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=device)
        data = self._own[name]
        every_byte = torch.empty(0, dtype=torch.uint8, device=data.device).set_(data.untyped_storage())
        every_byte.fill_(NAN_BYTE)  # an unfilled element must not look like the last push
        return data

    def repack(self) -> None:
        """Convert the loaded form back into the served form.

        Raises:
            WeightSyncError: SGLang's step produces different tensors (names, shapes, dtypes) than the first time.
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
        """Repack the layer from the loaded tensors and set :attr:`problem` if the result differs from before."""
        served = {**self._layer._parameters}
        forms = ((form, served.get(name)) for name, form in self._forms.items() if form is not None)
        more = sum(form.num_bytes for form, parameter in forms if self._place(form, parameter) is None)
        if more > MAX_MORE * sum(tensor.nbytes for tensor in loaded.values()):
            self.problem = f"loading it needs {more} bytes in addition to those that it serves from"
            return
        held = _tensors(self._layer, served)
        expected = {name: tensor.clone() for name, tensor in held.items()}
        older = {tensor.data_ptr() for tensor in _tensors(self._blank, {}).values()}
        for tensor in held.values():
            if tensor.data_ptr() not in older:
                tensor.zero_()  # a tensor that is not recreated must fail the comparison
        try:
            self.unpack()
            for name, parameter in self._layer._parameters.items():
                if parameter is not None and parameter.numel():
                    parameter.data.copy_(loaded[name])
            self.repack()
            wrong = sorted(name for name, tensor in expected.items() if not _are_same(tensor, held[name]))
            if wrong:
                self.problem = f"repacking it a second time changes {', '.join(wrong)}"
        except Exception as error:  # any error of SGLang's step; the engine serves, but refuses pushes
            self.problem = f"{type(error).__name__}: {error}"
        if self.problem:
            self._served = None
            self._show(served)
            _write(expected, held)


def watch_repacking(model: nn.Module) -> None:
    """Record and test every layer of a fresh model whose quantized weights SGLang will repack."""
    found: list[RepackedLayer] = []
    vars(model)[_LAYERS] = found
    names = {module: name for name, module in model.named_modules()}
    for method in {getattr(module, "quant_method", None) for module in names}:
        # SGLang's methods for FP4 experts wrap the method that has the config.
        config = getattr(getattr(method, "_fp8", method), "quant_config", None)
        if config is not None and config.get_name() in _PUSHED:
            vars(method)[_STEP] = functools.partial(_watched_step, getattr(method, _STEP), found, names)


def _watched_step(
    original: Callable[[nn.Module], None], found: list[RepackedLayer], names: dict[nn.Module, str], layer: nn.Module
) -> None:
    """Run ``original`` on a layer; on the first run, record what it repacks."""
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
        watched.problem = "it also repacks activation scales, which no push carries"
    else:
        watched.prove(loaded)
    if watched.problem and not any(one.problem for one in found):
        logger.warning("%s is repacked for SGLang's kernels; this engine refuses pushes: %s", name, watched.problem)
    found.append(watched)


def _is_unchanged(form: _Form | None, loaded: Tensor, served: nn.Parameter | None) -> bool:
    return form is not None and served is not None and form.is_of(served) and _are_same(loaded, served.data)


def reload(original: Callable[..., None], model: nn.Module, weights: Any, target_device: torch.device) -> None:
    """Load a checkpoint in place of SGLang's own function, which works only on unpacked models."""
    if not _layers(model) or refusal(model):
        original(model, weights, target_device)
        return
    unpack(model)
    model.load_weights(weights)  # type: ignore[operator]
    repack(model)


def unpack(model: nn.Module) -> None:
    """Switch all repacked layers of a model to their loaded form.

    Raises:
        WeightSyncError: a layer could not be repacked again.
    """
    if found := refusal(model):
        raise WeightSyncError(found)
    for layer in _layers(model):
        layer.unpack()


def repack(model: nn.Module) -> None:
    """Switch all layers back to their served form.

    Raises:
        WeightSyncError: SGLang's step produces different tensors (names, shapes, dtypes) than the first time.
    """
    with torch.no_grad():
        for layer in _layers(model):
            layer.repack()


def has_repacked_layers(model: nn.Module) -> bool:
    """Return True if SGLang repacks layers of the model."""
    return bool(_layers(model))


def is_unpacked(model: nn.Module) -> bool:
    """Return True if the model must be repacked before it serves."""
    return any(layer.is_unpacked for layer in _layers(model))


def refusal(model: nn.Module) -> str:
    """Return why the model refuses pushes; empty if it does not."""
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
    """Return a copy without parameters, which SGLang's step can change without affecting the layer itself."""
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
    """Return name -> tensor for a layer with these parameters, its quantization method and its scheme."""
    return {
        f"{part}{name}": value.data
        for part, state in _parts(layer, parameters)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _numbers(layer: nn.Module) -> dict[str, float]:
    return {f"{part}{n}": v for part, state in _parts(layer, {}) for n, v in state.items() if isinstance(v, float)}


def _write(made: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Copy tensors into the held tensors of the same names.

    Raises:
        WeightSyncError: names, shapes or dtypes do not match.
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
    """Return True if the elements fill a contiguous range of memory."""
    return (
        1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) == tensor.numel()
    )


def _are_same(first: Tensor, second: Tensor) -> bool:
    """Compare two tensors bit for bit."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (first, second)))
