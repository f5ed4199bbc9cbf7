"""A model and optimizer that release their memory between rollouts: what is restored, and from where."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage

from slime.backends.megatron_utils.checkpoints.optimizer_state import own_tensors
from slime.backends.megatron_utils.model import setup_model_and_optimizer
from slime.backends.megatron_utils.policies import ModelSwitch
from slime.backends.megatron_utils.sleep import OffloadedState
from slime.compose import parts
from slime.ray.parts import load_all
from slime.weights.pinned_memory import aligned
from tests.dist.trainer_case import make_args, write_model
from tests.unit.backends.megatron_utils.megatron_case import start_single_process
from tests.unit.backends.megatron_utils.test_train_step import train

CHUNK = 4096
"""Bytes; less than most storages here have."""
CASES = {
    "fp32": ("qwen3", ""),
    "bf16": ("qwen3", "--bf16"),
    "experts": ("qwen3_moe", "--bf16"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family, _ in CASES.values()}
    for family, folder in folders.items():
        write_model(folder, family)
    return folders


@pytest.fixture(autouse=True)
def new_memory_holds_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed memory that is allocated again often keeps its content, which would hide errors."""
    resize = UntypedStorage.resize_

    def resize_and_fill(storage: UntypedStorage, num_bytes: int) -> None:
        resize(storage, num_bytes)
        if num_bytes:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x7F)  # type: ignore[call-overload]

    monkeypatch.setattr(UntypedStorage, "resize_", resize_and_fill)


def build(folders: dict[str, Path], case: str) -> tuple[Any, Any, Any, Any]:
    family, flags = CASES[case]
    return build_with(folders[family], flags)


def build_with(folder: Path, flags: str) -> tuple[Any, Any, Any, Any]:
    args = make_args(folder, "--actor-num-gpus-per-node", 1, *flags.split())
    start_single_process(args)
    return args, *setup_model_and_optimizer(args, transforms=load_all(parts(args).transforms))


def storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    return {one.data_ptr(): one for one in (tensor.untyped_storage() for tensor in tensors) if one.nbytes()}


def weights_of(model: Any) -> list[Tensor]:
    return [tensor for _, tensor in (*model[0].named_parameters(), *model[0].named_buffers())]


def gradients_of(model: Any) -> list[Tensor]:
    return [buffer.grad_data for buffer in (*model[0].buffers, *model[0].expert_parallel_buffers)]


def on_host(found: dict[int, UntypedStorage]) -> int:
    return sum(aligned(one.nbytes()) for one in found.values())


def state(model: Any, optimizer: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*weights_of(model), *own_tensors(optimizer).values())]


def are_equal(tensors: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))


@pytest.mark.parametrize(
    ("case", "has_copies"), [*((case, True) for case in CASES), ("fp32", False), ("bf16", False), ("experts", False)]
)
def test_sleeping_between_rollouts_changes_no_bit(folders: dict[str, Path], case: str, has_copies: bool) -> None:
    check_sleep(partial(build, folders, case), has_copies=has_copies)


def check_sleep(build: Callable[[], tuple[Any, Any, Any, Any]], *, has_copies: bool) -> None:
    args, model, optimizer, scheduler = build()
    losses = [train(args, model, optimizer, scheduler, i)[0].metrics["loss"] for i in range(3)]
    expected = state(model, optimizer)
    args, model, optimizer, scheduler = build()
    switch = ModelSwitch(model)
    offloaded = OffloadedState(model, optimizer, chunk_bytes=CHUNK)
    if has_copies:
        switch.backup("actor")
        switch.backup_frozen()
        switch.copy("actor", "ref")
    found, num_chunks = [], []
    for rollout_id in range(3):
        weights, gradients = storages(weights_of(model)), storages(gradients_of(model))
        others = storages(own_tensors(optimizer).values()) if rollout_id else {}
        before = state(model, optimizer) if rollout_id else [tensor.clone() for tensor in weights_of(model)]
        offloaded.offload(switch.current_copies())
        assert gradients
        assert not any(one.nbytes() for one in (*weights.values(), *gradients.values(), *others.values()))
        num_chunks.append(len(offloaded.arena.chunks))
        offloaded.onload()
        after = state(model, optimizer) if rollout_id else weights_of(model)
        assert are_equal(before, after)
        assert not any(gradient.any() for gradient in gradients_of(model))
        if has_copies:
            switch.switch_to("ref")
            switch.switch_to("actor")
        switch.record_changed()
        found.append(train(args, model, optimizer, scheduler, rollout_id)[0].metrics["loss"])
        if has_copies:
            switch.backup("actor")
    assert found == losses
    assert are_equal(state(model, optimizer), expected)
    assert num_chunks[1] == num_chunks[2], "what is there a second time takes no new memory on the host"


@pytest.mark.parametrize("case", ["fp32", "bf16", "experts"])
@pytest.mark.parametrize("has_copies", [True, False])
def test_the_host_holds_masters_and_moments_and_weights_only_without_a_copy(
    folders: dict[str, Path], case: str, has_copies: bool
) -> None:
    args, model, optimizer, scheduler = build(folders, case)
    train(args, model, optimizer, scheduler)
    switch = ModelSwitch(model)
    if has_copies:
        switch.backup("actor")
    weights = storages(weights_of(model))
    others = storages(own_tensors(optimizer).values())
    expected = on_host({**({} if has_copies else weights), **{a: others[a] for a in others.keys() - weights.keys()}})
    offloaded = OffloadedState(model, optimizer, chunk_bytes=CHUNK)
    offloaded.offload(switch.current_copies())
    assert offloaded.arena.num_bytes == -(-expected // CHUNK) * CHUNK
    offloaded.onload()


def test_a_copy_that_the_model_is_ahead_of_is_not_what_comes_back(folders: dict[str, Path]) -> None:
    args, model, optimizer, scheduler = build(folders, "bf16")
    switch = ModelSwitch(model)
    switch.backup("actor")
    assert switch.current_copies()
    switch.record_changed()
    train(args, model, optimizer, scheduler)  # no backup follows, because the rollout failed
    trained = state(model, optimizer)
    offloaded = OffloadedState(model, optimizer, chunk_bytes=CHUNK)
    offloaded.offload(switch.current_copies())
    offloaded.onload()
    assert are_equal(state(model, optimizer), trained)


def test_a_model_without_an_optimizer_sleeps_too(folders: dict[str, Path]) -> None:
    _, model, _, _ = build(folders, "fp32")
    before = [tensor.clone() for tensor in weights_of(model)]
    offloaded = OffloadedState(model, None, chunk_bytes=CHUNK)
    offloaded.offload()
    offloaded.onload()
    assert are_equal(weights_of(model), before)
