"""Layers that are repacked after a load: verified when the model is built, unpacked and repacked in place."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slime.ext.fast_push.repacked_layers import (
    has_repacked_layers,
    is_unpacked,
    refusal,
    repack,
    unpack,
    watch_repacking,
)
from slime.utils.errors import WeightSyncError

Step = Callable[[nn.Module], None]


class Method:
    """Like SGLang's quantization methods: has a config, and a step that changes its layer."""

    quant_config: Any = Namespace(get_name=lambda: "fp8")

    def __init__(self, step: Step) -> None:
        self.step, self.scale = step, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.step(layer)


class Wrapper:
    """As SGLang's methods for FP4 experts: the config is in the method that it wraps."""

    def __init__(self, step: Step) -> None:
        self._fp8 = Method(step)
        self.scale = None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._fp8.process_weights_after_loading(layer)


class Model(nn.Module):
    def __init__(self, step: Step, *, is_quantized: bool = True, method: type[Any] = Method) -> None:
        super().__init__()
        self.proj = nn.Module()
        self.proj.quant_method = method(step)
        if not is_quantized:
            self.proj.quant_method.quant_config = None
        self.proj.register_parameter("bias", None)
        for name, shape in (("weight", (2, 48)), ("weight_scale", (3,))):
            self.proj.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))
            vars(self.proj._parameters[name])["weight_loader"] = Tensor.copy_
        watch_repacking(self)

    def load_weights(self, tensors: Any) -> None:
        for name, tensor in tensors:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter.data, tensor)


def start(step: Step, seed: int = 0, method: type[Any] = Method) -> Model:
    """As SGLang's loader does."""
    model = Model(step, method=method)
    load(model, seed)
    return model


def load(model: Model, seed: int) -> None:
    model.load_weights(checkpoint(seed))
    model.proj.quant_method.process_weights_after_loading(model.proj)


def checkpoint(seed: int) -> list[tuple[str, Tensor]]:
    torch.manual_seed(seed)
    return [("proj.weight", torch.rand(2, 48)), ("proj.weight_scale", torch.rand(3))]


def fresh(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def transpose(layer: nn.Module) -> None:
    layer.weight = fresh(layer.weight.t())
    layer.weight_scale = fresh(layer.weight_scale.max())
    layer.sums = layer.weight.sum(1)


def tile(layer: nn.Module) -> None:
    layer.weight = fresh(layer.weight.view(2, 24, 2).transpose(0, 1).reshape(24, 4))


def in_place(layer: nn.Module) -> None:
    layer.weight.copy_(layer.weight / layer.weight_scale.max())


def served(model: Model) -> dict[str, Tensor]:
    held = {name: p.data.clone() for name, p in model.named_parameters()}
    return held | {name: v.clone() for name, v in vars(model.proj).items() if isinstance(v, Tensor)}


def tile_with_new_scales(layer: nn.Module) -> None:
    """As Marlin's FP4: served scales are further parameters, beside the loaded ones."""
    tile(layer)
    layer.served_scale = fresh(layer.weight_scale.half())


@pytest.mark.parametrize(
    ("step", "method"),
    [(transpose, Method), (tile, Method), (in_place, Method), (tile_with_new_scales, Wrapper)],
)
def test_a_layer_is_repacked_with_other_weights_where_it_lies(step: Step, method: type[Any]) -> None:
    model, wanted = start(step, method=method), served(start(step, seed=1, method=method))
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert has_repacked_layers(model) and refusal(model) == ""
    for _ in range(2):
        unpack(model)
        unpack(model)  # the next push, after one that failed
        assert is_unpacked(model)
        model.load_weights(checkpoint(1))
        repack(model)
        assert not is_unpacked(model)
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
        assert all(torch.equal(wanted[name], tensor) for name, tensor in served(model).items())


def counting() -> Step:
    counts = iter(range(9))

    def step(layer: nn.Module) -> None:
        layer.weight = fresh(layer.weight.t() + next(counts))

    return step


def make_once() -> Step:
    sums: list[Tensor] = []

    def step(layer: nn.Module) -> None:
        layer.weight = fresh(layer.weight.t())
        sums.append(layer.weight.sum(1))
        layer.sums = sums[0]

    return step


def keep_number(layer: nn.Module) -> None:
    layer.weight = fresh(layer.weight.t())
    layer.quant_method.scale = float(layer.weight_scale.max())


def narrow(layer: nn.Module) -> None:
    layer.weight = fresh(layer.weight.to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (counting(), "repacking it a second time changes weight"),
        (make_once(), "repacking it a second time changes sums"),
        (narrow, "loading it needs 384 bytes in addition to those that it serves from"),
    ],
)
def test_a_layer_that_cannot_be_repacked_serves_and_refuses_pushes(step: Step, why: str) -> None:
    model = start(step)
    before = served(model)
    assert f"repacked 1 layers for its kernels and cannot do so again with other weights: proj: {why}" in refusal(
        model
    )
    with pytest.raises(WeightSyncError, match="Use an --hf-checkpoint in FP8 by blocks"):
        unpack(model)
    assert not is_unpacked(model)
    assert all(torch.equal(before[name].float(), tensor.float()) for name, tensor in served(model).items())


def test_numbers_that_a_step_keeps_outside_of_tensors_are_no_silent_loss() -> None:
    model = start(keep_number)
    assert refusal(model) == ""  # the same weights give the same number
    unpack(model)
    model.load_weights(checkpoint(1))
    with pytest.raises(WeightSyncError, match="proj keeps quant_method.scale outside of tensors"):
        repack(model)
    assert is_unpacked(model), "the next push loads it again"
    unpack(model)
    model.load_weights(checkpoint(0))
    repack(model)
