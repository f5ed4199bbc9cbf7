"""The work of one trainer rank: passes and steps of many adapters of one model.

A request is cut into packs of up to a micro-batch, by the request alone; the gradient of a pack is computed from its
rows alone, and packs of one model add up in their order.  Without ``packs_clients`` a micro-batch is one pack, so what
other clients send changes no bit.  With it packs of several clients share the products with the frozen weights.  The
number of rows decides the bits of such a product, so every micro-batch is padded to ``--max-tokens-per-gpu``; a row of
the result then depends on its own row of the input alone.
"""

from __future__ import annotations

import shutil
import zlib
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu
from megatron.core.utils import get_model_config, unwrap_model

from slime.algorithms.log_probs import logits_of, vocab_parallel_log_probs
from slime.backends.megatron_utils.cp_utils import packing_of
from slime.backends.megatron_utils.data import DataIterator, current_device, get_batch
from slime.backends.megatron_utils.forward import run_microbatches, run_model
from slime.backends.megatron_utils.log_probs import vocab_group
from slime.backends.megatron_utils.model_transform import added_parameters
from slime.ext.training_api.adapter_state import MOMENTS, AdapterState, parts_of, trains
from slime.ext.training_api.backend import AdamParams, Datum, LoraSpec, PassRequest, RequestRefused
from slime.ext.training_api.losses import LOSSES, TARGETS
from slime.train_data.bins import first_fit, karmarkar_karp
from slime.utils.files import sync_to_disk, write_atomically

OPTIMIZER_FILE = "optimizer.moments"
"""Beside PEFT's files, in the format of safetensors: ``{moment}.{PEFT's name}`` fp32, and the number of steps in its
header.  Engines read every ``*.safetensors`` of the folder as a part of the adapter."""
_STEPS = "num_steps"

MAX_PACKS = 16
"""Of a micro-batch: each has a copy of its adapter and a gradient on the GPU, however few its tokens are."""
Outputs = dict[int, dict[str, np.ndarray]]
"""What a loss gives, by the datum's place in its request."""


@dataclass(frozen=True)
class Pack:
    """Data of one request that go into one micro-batch."""

    answer: Outputs
    """Of the whole request; filled with the outputs of these data."""
    request: PassRequest
    picked: Sequence[int]
    """Places in ``request.data``."""

    @property
    def data(self) -> list[Datum]:
        """What is computed, in its order."""
        return [self.request.data[index] for index in self.picked]

    @cached_property
    def num_tokens(self) -> int:
        """Their rows in the micro-batch."""
        return sum(len(datum.tokens) for datum in self.data)


class Adapters(Protocol):
    """What the transform of a run with adapters must offer, as ``several``."""

    def hold(self, chunk: torch.nn.Module, values: Sequence[Tensor] | None, rows: Tensor | None = None) -> None: ...

    def draw(self, model: Sequence[torch.nn.Module], *, seed: int, rank: int) -> None: ...

    def as_peft(
        self, model: Sequence[torch.nn.Module], values: Mapping[str, Tensor], *, rank: int
    ) -> dict[str, Tensor]: ...

    def from_peft(
        self,
        model: Sequence[torch.nn.Module],
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        *,
        rank: int,
        source: str,
    ) -> None: ...

    def write_folder(self, folder: Path, tensors: Mapping[str, Tensor], *, rank: int) -> None: ...

    def read_folder(self, folder: Path, *, rank: int) -> dict[str, Tensor]: ...


class AdapterTrainer:
    """Adapters by model id, over a model that is built and loaded.  Every method is called on all ranks alike.

    Args:
        args: of the run.
        model: this rank's one chunk.
        packs_clients: whether micro-batches hold data of several models.
        num_on_device: adapters whose numbers and moments stay on the GPU while they live, the first ones; those of
            others wait on the host.
    """

    def __init__(
        self,
        args: Namespace,
        model: Sequence[torch.nn.Module],
        *,
        packs_clients: bool = False,
        num_on_device: int = 0,
    ) -> None:
        self.args, self.model = args, model
        self._packs_clients, self._num_on_device = packs_clients, num_on_device
        transform: Any = added_parameters(model)
        self._adapters: Adapters = transform.several
        self._inner = unwrap_model(model[0])
        named: list[tuple[str, Any]] = list(transform.named_parameters(self._inner))
        self._keys, self._parameters = [f"0.{name}" for name, _ in named], [one for _, one in named]
        self._states: dict[str, AdapterState] = {}
        config = get_model_config(model[0])
        config.calculate_per_token_loss = True  # a loss is a sum: nothing divides it
        config.finalize_model_grads_func = None  # gradients are reduced at a step

    # Adapters

    def add(self, model_id: str, spec: LoraSpec) -> None:
        """Make an adapter; the seed must be given."""
        assert spec.seed is not None
        self._adapters.draw(self.model, seed=spec.seed, rank=spec.rank)
        values = torch.cat([parameter.detach().float().flatten() for parameter in self._parameters])
        if sum(state.values.is_cuda for state in self._states.values()) >= self._num_on_device:
            values = torch.empty(values.shape, pin_memory=values.is_cuda).copy_(values)
        self._states[model_id] = AdapterState(spec, values)

    def remove(self, model_id: str) -> None:
        """Forget an adapter."""
        del self._states[model_id]

    def _by_key(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._keys, parts_of(flat, self._parameters), strict=True))

    # Passes

    def run(self, requests: Sequence[PassRequest]) -> list[Outputs]:
        """Run passes; give what this rank has of each answer."""
        answers: list[Outputs] = [{} for _ in requests]
        for backward in (True, False):
            packs = [
                Pack(answers[index], request, picked)
                for index, request in enumerate(requests)
                if request.backward is backward
                for picked in self._share(request)
            ]
            self.model[0].train(backward)
            for micro_batch in self._micro_batches(packs):
                with torch.set_grad_enabled(backward):
                    self._run(micro_batch, backward)
        return answers

    def _share(self, request: PassRequest) -> list[list[int]]:
        """Return the data that this data-parallel rank computes, in packs of a micro-batch, by the request alone."""
        lengths = [len(datum.tokens) for datum in request.data]
        size, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        parts = karmarkar_karp(lengths, min(size, len(lengths)))
        place = (rank - zlib.crc32(request.model_id.encode())) % size  # small requests go to different ranks
        mine = parts[place] if place < len(parts) else []
        packs = first_fit([lengths[index] for index in mine], self.args.max_tokens_per_gpu)
        return [[mine[index] for index in pack] for pack in packs]

    def _micro_batches(self, packs: Sequence[Pack]) -> list[list[Pack]]:
        """Return which packs are computed together; those of one model stay in order, as gradients add up."""
        if not self._packs_clients:
            return [[pack] for pack in packs]
        batches: list[list[Pack]] = []
        first: dict[str, int] = {}
        for pack in packs:
            place = first.get(pack.request.model_id, 0)
            while place < len(batches):
                num_tokens = pack.num_tokens + sum(one.num_tokens for one in batches[place])
                if num_tokens <= self.args.max_tokens_per_gpu and len(batches[place]) < MAX_PACKS:
                    break
                place += 1
            else:
                batches.append([])
            batches[place].append(pack)
            first[pack.request.model_id] = place
        return batches

    def _run(self, micro_batch: Sequence[Pack], backward: bool) -> None:
        data = [datum for pack in micro_batch for datum in pack.data]
        iterator = DataIterator(_columns(data), [range(len(data))])
        packing = packing_of(self.args)
        if self._packs_clients:  # a product of more rows may have other bits
            packing = replace(packing, pad_multiple=self.args.max_tokens_per_gpu)
        states = [self._states[pack.request.model_id] for pack in micro_batch]
        held = self._hold(states, [pack.num_tokens for pack in micro_batch])

        def step(iterator: DataIterator, chunk: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            return run_model(chunk, get_batch(iterator, (), packing)), partial(self._loss, micro_batch)

        run_microbatches(step, self.model, [iterator], 1, packing, forward_only=not backward)
        self._adapters.hold(self._inner, None)
        if backward:
            self._keep_gradients(states, held)

    @torch.no_grad()
    def _hold(self, states: Sequence[AdapterState], num_tokens: Sequence[int]) -> list[Tensor]:
        """Put adapters into the model, each for so many tokens, one after the other; return what gets gradients."""
        device, dtype = current_device(), self._parameters[0].dtype
        values = [state.values.to(device, non_blocking=True).to(dtype) for state in states]
        rows: Tensor | None = None
        sides: tuple[int, ...] = ()
        if self._packs_clients:
            values.append(torch.zeros_like(values[0]))  # of the padding
            rows = torch.tensor([*num_tokens, self.args.max_tokens_per_gpu - sum(num_tokens)])
            sides = (len(rows),)
        parts = torch.stack(values).split([parameter.numel() for parameter in self._parameters], dim=1)
        held = [  # aligned copies: addresses decide bits, too
            part.view(*sides, *parameter.shape).clone().requires_grad_()
            for part, parameter in zip(parts, self._parameters, strict=True)
        ]
        self._adapters.hold(self._inner, held, rows)
        return held

    def _loss(self, micro_batch: Sequence[Pack], logits: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the sum of the losses, as megatron-core takes it; write each datum's outputs into its answer."""
        inputs = [_on_device(datum, logits.device) for pack in micro_batch for datum in pack.data]
        log_probs = self._log_probs(logits.squeeze(0), [one[TARGETS] for one in inputs])
        rows, losses = zip(log_probs, inputs, strict=True), []
        for pack in micro_batch:
            loss = LOSSES[pack.request.loss]
            for index in pack.picked:
                log_prob, one = next(rows)
                losses.append(loss.compute(log_prob, one, pack.request.loss_config))
                if not mpu.get_tensor_model_parallel_rank():
                    found = {"logprobs": log_prob, "elementwise_loss": losses[-1]}
                    pack.answer[index] = {name: tensor.detach().cpu().numpy() for name, tensor in found.items()}
        total = torch.cat([value.flatten() for value in losses]).sum()
        return total, torch.ones((), dtype=torch.int, device=logits.device), None

    def _log_probs(self, logits_TV: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
        """Return the log-probs of the targets, in their shapes; row t of the stream predicts targets[t]."""
        lengths = [len(target) for target in targets]
        first_R = torch.cat([target if target.ndim == 1 else target[:, 0] for target in targets])
        rows_R = torch.arange(len(first_R), device=logits_TV.device)
        has_several = any(target.ndim == 2 for target in targets)
        log_prob_R, _ = vocab_parallel_log_probs(
            logits_TV,
            first_R,
            rows_R=rows_R,
            tp_group=vocab_group(),
            chunk_size=self.args.log_probs_chunk_size,
            vocab_size=self.args.vocab_size,
            overwrite_logits=not has_several,
        )
        found = list(log_prob_R.split(lengths))
        for index, (target, rows) in enumerate(zip(targets, rows_R.split(lengths), strict=True)):
            if target.ndim == 2:
                ids = torch.cat([target[:, :1], target], dim=1)
                logit = logits_of(logits_TV, rows, ids, tp_group=vocab_group())
                found[index] = logit[:, 1:] - (logit[:, :1] - found[index][:, None])
        return found

    @torch.no_grad()
    def _keep_gradients(self, states: Sequence[AdapterState], held: Sequence[Tensor]) -> None:
        """Add the gradients of a micro-batch to the adapters'; modules that one does not train get 0."""
        num_held = len(states) + self._packs_clients
        found = [torch.zeros_like(one) if one.grad is None else one.grad for one in held]
        joined = torch.cat([one.reshape(num_held, -1) for one in found], dim=1)
        for state, row in zip(states, joined, strict=False):
            gradient = row.float()
            if not (state.spec.train_attn and state.spec.train_mlp):
                for name, part in self._by_key(gradient).items():
                    if not trains(state.spec, name):
                        part.zero_()
            state.add_gradient(gradient)

    # Steps

    def drop_gradient(self, model_id: str) -> None:
        """Clear the gradient that has added up."""
        self._states[model_id].has_gradient = False

    @torch.no_grad()
    def step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """Take a step with the gradient that has added up.

        Raises:
            RequestRefused: it is not finite; the numbers stay, and it is dropped.
        """
        state = self._states[model_id]
        gradient = state.gradient_on(current_device())
        norm = self._reduce(gradient)
        if not np.isfinite(norm):
            state.has_gradient = False
            raise RequestRefused(
                f"the norm of the gradient is {norm}: no step was taken, and the gradient is dropped. Look at the "
                "loss's inputs and the learning rate."
            )
        if 0 < adam.grad_clip_norm < norm:
            gradient *= adam.grad_clip_norm / (norm + 1e-6)
        with torch.enable_grad():
            state.step(gradient, adam)
        return {"grad_norm": norm}

    def _reduce(self, gradient: Tensor) -> float:
        """Sum a gradient over the ranks that have other tokens, in place; return its norm over all ranks."""
        group = mpu.get_tensor_model_parallel_group()
        parts = parts_of(gradient, self._parameters)
        if group.size() > 1:
            partial_sums = [
                part
                for part, parameter in zip(parts, self._parameters, strict=True)
                if getattr(parameter, "sequence_parallel", False)
            ]
            if partial_sums:
                joined = torch.cat([part.flatten() for part in partial_sums])
                dist.all_reduce(joined, group=group)
                torch._foreach_copy_(partial_sums, parts_of(joined, partial_sums))
        if mpu.get_data_parallel_world_size() > 1:
            dist.all_reduce(gradient, group=mpu.get_data_parallel_group())
        is_first = group.rank() == 0
        own = [
            part
            for part, parameter in zip(parts, self._parameters, strict=True)
            if is_first or getattr(parameter, "tensor_model_parallel", False)
        ]
        square = torch.stack(torch._foreach_norm(own, dtype=torch.float64)).square().sum()
        if group.size() > 1:
            dist.all_reduce(square, group=group)
        return float(square.sqrt())

    # Disk

    def save(self, model_id: str, folder: Path, with_optimizer: bool) -> None:
        """Write an adapter, the whole folder at once; rank 0 writes.

        Raises:
            RequestRefused: the folder exists.
            DataError: the disk refuses.
        """
        state = self._states[model_id]
        rank = state.spec.rank
        tensors = self._adapters.as_peft(self.model, self._by_key(state.values), rank=rank)
        moments: dict[str, Tensor] = {}
        for name in MOMENTS if with_optimizer else ():
            peft = self._adapters.as_peft(self.model, self._by_key(state.moments[name]), rank=rank)
            moments |= {f"{name}.{key}": tensor for key, tensor in peft.items()}
        if dist.get_rank():
            return
        if folder.exists():  # no other rank looks: one that comes late would see what this one has written
            raise RequestRefused(f"{folder} exists; save under another name.")
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            self._adapters.write_folder(unfinished, tensors, rank=rank)
            if with_optimizer:
                data = save(moments, metadata={_STEPS: str(state.num_steps)})
                write_atomically(unfinished / OPTIMIZER_FILE, lambda file: file.write(data), what="Adam's moments")
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        sync_to_disk(folder.parent)

    def load(self, model_id: str, folder: Path, with_optimizer: bool) -> None:
        """Give an adapter what :meth:`save` wrote; its gradient is dropped.

        Raises:
            DataError: the folder is damaged, of another rank or of other modules.
            RequestRefused: there is no optimizer's state.
        """
        state = self._states[model_id]
        rank, num_steps = state.spec.rank, 0
        found = {"": self._adapters.read_folder(folder, rank=rank)}
        if with_optimizer:
            num_steps, moments = _read_moments(folder / OPTIMIZER_FILE)
            found |= moments
        new = {name: torch.zeros_like(state.values) for name in found}
        for name, tensors in found.items():
            source = f"{folder} {name}".strip()
            self._adapters.from_peft(self.model, tensors, self._by_key(new[name]), rank=rank, source=source)
        state.restart()
        state.values.copy_(new.pop(""))
        for name, flat in new.items():
            state.moments[name].copy_(flat)
        state.num_steps = num_steps


def _read_moments(path: Path) -> tuple[int, dict[str, dict[str, Tensor]]]:
    """Return the number of steps, and the moments by name and PEFT's names."""
    found: dict[str, dict[str, Tensor]] = {name: {} for name in MOMENTS}
    try:
        with safe_open(path, "pt") as file:
            num_steps = int(file.metadata()[_STEPS])
            for key in file.keys():  # noqa: SIM118
                name, _, peft = key.partition(".")
                found[name][peft] = file.get_tensor(key)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RequestRefused(
            f"{path.parent} has no state of the optimizer that can be read ({type(error).__name__}: {error}); load it "
            "without the optimizer, or one saved with it."
        ) from error
    return num_steps, found


def _columns(data: Sequence[Datum]) -> dict[str, Any]:
    """Return the columns of data as micro-batches are packed from."""
    device, lengths = current_device(), [len(datum.tokens) for datum in data]
    return {
        "tokens": [torch.tensor(datum.tokens, dtype=torch.long).to(device) for datum in data],
        "total_lengths": lengths,
        "response_lengths": [length - 1 for length in lengths],
        "loss_masks": [torch.ones(length - 1, dtype=torch.int, device=device) for length in lengths],
    }


def _on_device(datum: Datum, device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.tensor(values, dtype=torch.long if name == TARGETS else torch.float32).to(device)
        for name, values in datum.inputs.items()
    }
