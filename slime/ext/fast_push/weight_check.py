"""Checks, run inside the engine in place of loading, that the engine holds what the trainer sends.

SGLang calls these functions as custom weight loaders: ``update_weights_from_tensor`` with ``load_format`` set to the
function's import path.  ``update_weights_from_distributed`` has no such extension point, so a check always uses
from_tensor, even for engines that get their weights over a process group.  The payload is a plain list of
``(name, tensor)`` pairs, by value (``pickle``, base64), because SGLang does not unpack a flattened bucket for custom
loaders.

A loader must not raise, because an exception would end SGLang's scheduler.  Problems are kept in the process and read
back through ``/get_weights_by_name`` under the name ``CHECK_REPORT``; ``engine_verbs.run_weight_check`` does that
after each check and raises WeightSyncError.

The comparison works for every model and layout without knowing names: the model's own ``load_weights`` runs on scratch
copies of the parameters, filled with the bitwise complement of the parameters.  Elements that then equal the parameter
were already right; elements that still are the complement were not written; any other element is a difference.  Fused
qkv and gate/up, tensor-parallel slices and casts are those of the real load.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from slime.backends.sglang_utils.sglang_plugin import is_own_scale
from slime.ext.fast_push.load_plan import is_description, unread_memory
from slime.ext.fast_push.load_trace import trace_load
from slime.ext.fast_push.loader_report import reporting
from slime.ext.fast_push.manifest import Manifest
from slime.ext.fast_push.messages import decode

NamedTensors = Iterable[tuple[str, Tensor]]

SAME_WIDTH_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAN_BYTE = 0xFF
"""All bits set is NaN in every floating-point format in use (fp32, bf16, fp16, fp8 e4m3fn and e5m2)."""


def compare_weights(model: nn.Module, named_tensors: NamedTensors) -> None:
    """Compare HF-named tensors with the model's weights, which stay unchanged.

    Temporarily takes as much additional memory as the weights.
    """
    with reporting(model) as problems:
        problems += differing_names(model, [one for one in named_tensors if not is_description(one[0])])


def fill_with_nan(model: nn.Module, named_tensors: NamedTensors) -> None:
    """Overwrite every floating-point parameter that pushes replace with NaN, so that an omission is detected.

    ``named_tensors`` is empty, or a message with a manifest whose ``kept`` tensors are not pushed.
    """
    with reporting(model):
        fill_parameters_with_nan(model, _pushed_parameters(model, named_tensors))


def find_nan(model: nn.Module, named_tensors: NamedTensors) -> None:
    """Report parameters with elements that :func:`fill_with_nan` (same arguments) wrote and no push replaced."""
    with reporting(model) as problems:
        problems += find_nan_in(model, _pushed_parameters(model, named_tensors))


def _pushed_parameters(model: nn.Module, named_tensors: NamedTensors) -> set[str]:
    """Return the names of parameters that a push replaces, according to the message or else to the last push.

    Args:
        named_tensors: see :func:`fill_with_nan`.
    """
    kept = [entry for message in decode(named_tensors) for entry in Manifest.from_json(message["manifest"]).kept]
    load = vars(model).get("_slime_load")
    if not kept and load is not None and load.plan is not None:
        kept = list(load.plan.manifest.kept)
    writes = trace_load(model, kept).writes if kept else []
    memory = {write.target.untyped_storage().data_ptr() for write in writes}
    return {name for name, p in model.named_parameters() if p.untyped_storage().data_ptr() not in memory}


def fill_parameters_with_nan(model: nn.Module, only: Collection[str] | None = None) -> None:
    """Overwrite floating-point parameters (all, or those in ``only``) with NaN, except what no model reads."""
    with torch.no_grad():
        unread = [(part, part.clone()) for part in unread_memory(model)]
        for name, parameter in model.named_parameters():
            if _is_pushed(name, parameter, only):
                _bits(parameter.data).fill_(_nan_of(parameter))
        for part, held in unread:
            part.copy_(held)


def find_nan_in(model: nn.Module, only: Collection[str] | None = None) -> list[str]:
    """Return one sentence per parameter (of all, or of ``only``) with elements not written since the fill."""
    problems, unread = [], unread_memory(model)
    for name, parameter in model.named_parameters():
        if _is_pushed(name, parameter, only):
            memory = parameter.untyped_storage().data_ptr()
            count = _num_nan(parameter.data)
            count -= sum(_num_nan(part) for part in unread if part.untyped_storage().data_ptr() == memory)
            if count:
                problems.append(f"{name}: {count} of {parameter.numel()} elements were never pushed")
    return problems


def _is_pushed(name: str, parameter: Tensor, only: Collection[str] | None) -> bool:
    """Return True for floating-point parameters other than the engine's own scales and descriptions."""
    is_own = is_own_scale(name) or is_description(name)
    return parameter.is_floating_point() and not is_own and (only is None or name in only)


def _num_nan(tensor: Tensor) -> int:
    return int((_bits(tensor) == _nan_of(tensor)).sum())


def _nan_of(parameter: Tensor) -> int:
    return -1 if parameter.element_size() > 1 else NAN_BYTE


def differing_names(
    model: nn.Module, named_tensors: list[tuple[str, Tensor]], only: Collection[str] | None = None
) -> list[str]:
    """Return one sentence for each of ``named_tensors`` whose loading would change the model.

    Args:
        model: has a ``load_weights``; its weights are the same afterwards.
        only: the parameters that the tensors go to, if known; limits the memory taken.

    Raises:
        torch.OutOfMemoryError: the copies, or the load into them, do not fit into memory.
    """
    parameters = {name: p for name, p in model.named_parameters() if only is None or name in only}
    held = {name: parameter.data for name, parameter in parameters.items()}
    try:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.data = _complement(held[name])
            try:
                model.load_weights(named_tensors)  # type: ignore[operator]
            except torch.OutOfMemoryError:
                raise  # not a property of the tensors sent
            except Exception as error:  # any error of the model's loader is reported, not raised into the scheduler
                return [_unloadable(named_tensors, error)]
            wrong = {name for name in parameters if _num_different(parameters[name].data, held[name])}
            return _blame(model, named_tensors, parameters, held, wrong) if wrong else []
    finally:
        for name, parameter in parameters.items():
            parameter.data = held[name]
        rebuild_derived(model)  # the loads above derived values from the scratch copies


def rebuild_derived(model: nn.Module) -> None:
    """Recompute what a model derives from its weights, such as the split ``kv_b_proj`` of latent attention.

    Some of SGLang's draft models inherit ``post_load_weights`` from their target, and look for the target's layers
    unless ``is_nextn`` is True.
    """
    rebuild = getattr(model, "post_load_weights", None)
    if rebuild is None:
        return
    is_draft = type(model).__name__.endswith("NextN") and "is_nextn" in inspect.signature(rebuild).parameters
    with torch.no_grad():
        rebuild(**({"is_nextn": True} if is_draft else {}))


def _unloadable(named_tensors: list[tuple[str, Tensor]], error: Exception) -> str:
    sent = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named_tensors[:5])
    more = f" and {len(named_tensors) - 5} more" if len(named_tensors) > 5 else ""
    return f"the engine's model does not load what was sent ({sent}{more}): {type(error).__name__}: {error}"


def _blame(
    model: nn.Module,
    named_tensors: list[tuple[str, Tensor]],
    parameters: dict[str, nn.Parameter],
    held: dict[str, Tensor],
    wrong: set[str],
) -> list[str]:
    """Find which tensors differ by loading one at a time into fresh scratch copies."""
    blamed = []
    for name, tensor in named_tensors:
        for parameter_name in wrong:
            parameters[parameter_name].data = _complement(held[parameter_name])
        model.load_weights([(name, tensor)])  # type: ignore[operator]
        for parameter_name in sorted(wrong):
            count = _num_different(parameters[parameter_name].data, held[parameter_name])
            if count:
                blamed.append(f"{name} (shape {list(tensor.shape)}): {count} elements differ in {parameter_name}")
    return blamed or [f"{name} (which pushed tensor is unclear)" for name in sorted(wrong)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(SAME_WIDTH_INT[tensor.element_size()])


def _complement(tensor: Tensor) -> Tensor:
    return torch.bitwise_not(_bits(tensor)).view(tensor.dtype)


def _num_different(scratch: Tensor, held: Tensor) -> int:
    written, kept = _bits(scratch), _bits(held)
    return int(((written != kept) & (written != torch.bitwise_not(kept))).sum())
