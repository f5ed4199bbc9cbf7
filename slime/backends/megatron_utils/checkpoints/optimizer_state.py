"""Optimizer state in checkpoints: one sharded tensor per model parameter and state, placed like the parameter.

megatron-core 0.16.1 over ``torch.optim.AdamW`` (its Adam without TransformerEngine and Apex) cannot load the state
that it saves: it puts ONE step counter into the state of all parameters, which AdamW then advances once per parameter
(``distrib_optimizer.py:821``), and with several gradient buckets it writes shifted values (``:1474``).  This module
therefore writes and reads the state of the distributed optimizer.  Every tensor is stored whole and sliced on load, so
TP, PP, EP, DP, the bucket sizes and ``--optimizer-cpu-offload`` may change between save and load.  The tensors have
the names of the wheel's ``fully_reshardable`` format: ``optimizer.state.{param, exp_avg, exp_avg_sq}.<parameter>``.

    state = {"model": module.sharded_state_dict()}
    state["optimizer"] = optimizer_state(optimizer, state)       # collective
    ...
    load_optimizer_state(optimizer, state, reader)               # collective; load the weights first
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, param_group_identifier_keys

from slime.backends.megatron_utils.adam import MOMENTS, OwnAdam, parts_of
from slime.backends.megatron_utils.checkpoints.checkpoint_loader import load_sharded
from slime.backends.megatron_utils.checkpoints.checkpoint_reader import CheckpointReader
from slime.utils.distributed_utils import gather_objects
from slime.utils.errors import DataError

Entry: TypeAlias = ShardedTensor | ShardedTensorFactory
Entries = dict[torch.nn.Parameter, Entry]

MASTER = "param"
STATE_NAMES = (MASTER, *MOMENTS)
"""Per parameter: the fp32 master weight and Adam's two moments."""

GROUP_NUMBERS = ("lr", "weight_decay", "betas", "eps", "max_lr", "min_lr")
"""Settings that a parameter group takes from a checkpoint.  The kernel choice (``fused``) stays this run's."""


class Bucket(NamedTuple):
    """One gradient bucket of a distributed optimizer.  All ranks of the group hold equal shares of it."""

    size: int
    device: torch.device
    ranges: dict[torch.nn.Parameter, slice]
    """The elements of each parameter in the bucket; there may be padding between parameters."""
    local: dict[torch.nn.Parameter, dict[str, Any]]
    """Parameters that overlap this rank's share -> the wheel's ranges of the overlap."""


def optimizer_state(optimizer: MegatronOptimizer, model_state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's sharded state for ``dist_checkpointing.save``.  Collective; the tensors are on the host.

    Args:
        optimizer: the result of ``get_megatron_optimizer``.
        model_state: the sharded state of the *live* model; entries are matched by parameter identity.
    """
    members = parts_of(optimizer)
    entries = _model_entries(model_state)
    tensors: dict[str, Entry] = {}
    for member in members:
        tensors |= _member_tensors(member, entries)
    tensors |= _frozen_layers(members, entries)
    state: dict[str, Any] = {"optimizer": {"param_groups": _groups_of_all_ranks(members)}, "param_state": tensors}
    scaler = next((member.grad_scaler for member in members if member.grad_scaler), None)
    if scaler is not None:
        state["grad_scaler"] = scaler.state_dict()
    return state


def load_optimizer_state(
    optimizer: MegatronOptimizer,
    model_state: dict[str, Any],
    reader: CheckpointReader,
    *,
    keep_learning_rates: bool = True,
) -> None:
    """Restore an optimizer from a checkpoint.  Collective.

    Load the weights first: the master weights of fp32 parameters are views of them.

    Args:
        keep_learning_rates: keep the learning-rate bounds of this run's flags.

    Raises:
        DataError: the checkpoint's parameter groups do not fit the optimizer's.
    """
    members = parts_of(optimizer)
    entries = _model_entries(model_state)
    request: dict[str, Entry] = {}
    for member in members:
        request |= _request(member, entries)
    if dist.get_world_size() == 1:
        # megatron-core takes the shards that no rank requests for another rank's; with a single rank, all are its own.
        request |= _frozen_layers(members, entries)
    # Each rank requests every parameter that it holds a part of, so tensors are requested more than once.
    loaded = load_sharded({"optimizer": {"param_state": request}}, reader, validate_access_integrity=False)
    state = loaded["optimizer"]
    groups = list(_groups_in(state))
    for member in members:
        _restore_member(member, state["param_state"], groups, keep_learning_rates)
        if member.grad_scaler and "grad_scaler" in state:
            member.grad_scaler.load_state_dict(state["grad_scaler"])


@torch.no_grad()
def refresh_master_weights(optimizer: MegatronOptimizer) -> None:
    """Copy the model's freshly loaded weights into the optimizer's fp32 master weights."""
    for member in parts_of(optimizer):
        if isinstance(member.optimizer, HybridDeviceOptimizer):
            # reload_model_params skips the host copies of parameters that are fp32 in the model.
            for held, master in member.optimizer.param_to_inner_param.items():
                if master is not held:
                    master.copy_(held)
        else:
            member.reload_model_params()


def own_tensors(optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Return this rank's part of an optimizer as live tensors: master weights, moments, step counters.

    Optimizers with the same flags and parallel layout have the same names.
    """
    return {
        f"optimizer.{number}.{bucket_number}.{place}.{name}": tensor
        for number, member in enumerate(parts_of(optimizer))
        for live in [LiveStates(member)]
        for bucket_number, bucket in enumerate(buckets(member))
        for place, parameter in enumerate(bucket.local)
        for name, tensor in live.tensors(parameter).items()
    }


def _model_entries(model_state: dict[str, Any]) -> Entries:
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    return {entry.data: entry for entry in nested_values(sharded)}


def buckets(member: DistributedOptimizer) -> Iterator[Bucket]:
    """Yield the buckets of an optimizer in memory order."""
    for buffer, ranges in zip(member.buffers, member.gbuf_ranges, strict=True):
        (per_bucket,) = ranges.values()
        for index, (bucket, local) in enumerate(zip(buffer.buckets, per_bucket, strict=True)):
            # Offsets in the buffer include padding; relative to the bucket they are correct on every rank.
            whole = {
                parameter: slice(start - bucket.offset, end - bucket.offset)
                for parameter, (start, end, where) in buffer.param_index_map.items()
                if where == index
            }
            yield Bucket(bucket.grad_data.numel(), bucket.grad_data.device, whole, local["param_map"])


class LiveStates:
    """The optimizer state of one chained optimizer on this rank: flat slices of master weights and moments."""

    def __init__(self, member: DistributedOptimizer) -> None:
        self._hybrid = member.optimizer if isinstance(member.optimizer, HybridDeviceOptimizer) else None
        # With --optimizer-cpu-offload each parameter has its own torch optimizer, over its host copy.
        parts = self._hybrid.sub_optimizers if self._hybrid else [member.optimizer]
        self._home = {
            master: (part, group) for part in parts for group in part.param_groups for master in group["params"]
        }
        # Groups list the shards of fp32 parameters first, an order that megatron-core's own map does not reflect.
        self._held = {
            parameter: shard
            for ranges, group in zip(member.opt_group_ranges, member.optimizer.param_groups, strict=True)
            for parameter, shard in zip(
                sorted(ranges["params"], key=lambda one: one.dtype != torch.float32), group["params"], strict=True
            )
        }

    def held(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the slice that the distributed optimizer steps; with CPU offload this is the slice on the GPU."""
        return self._held[parameter]

    def tensors(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the master weight and its Adam state, in the dtypes in which they are kept."""
        master, _, state = self._state(parameter)
        return {MASTER: master, **state}

    def show(self, parameter: torch.nn.Parameter) -> None:
        """With CPU offload, copy the master weight on the host to its slice on the GPU."""
        master, held = self._master(parameter), self.held(parameter)
        if held.data_ptr() != master.data_ptr():
            held.copy_(master)

    def read(self, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
        """Return the master weight or a moment in fp32."""
        master, adam, state = self._state(parameter)
        if name == MASTER:
            return master.detach()
        return adam.moment(master, name) if isinstance(adam, OwnAdam) else state[name]

    def write(self, parameter: torch.nn.Parameter, name: str, value: torch.Tensor) -> None:
        """Set the master weight or a moment from fp32 values."""
        master, adam, state = self._state(parameter)
        if name == MASTER:
            master.copy_(value)
            self.show(parameter)
        elif isinstance(adam, OwnAdam):
            adam.set_moment(master, name, value)
        else:
            state[name].copy_(value)

    def set_step(self, parameter: torch.nn.Parameter, step: float) -> None:
        """Set the step counter of one parameter."""
        self._state(parameter)[2]["step"].fill_(step)

    def _master(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        held = self.held(parameter)
        return self._hybrid.param_to_inner_param[held] if self._hybrid else held

    def _state(
        self, parameter: torch.nn.Parameter
    ) -> tuple[torch.Tensor, torch.optim.Optimizer, dict[str, torch.Tensor]]:
        """Return the master weight, its Adam and its state, which is created as in a first step if missing."""
        master = self._master(parameter)
        part, group = self._home[master]
        if isinstance(part, OwnAdam):
            return master, part, part.initialize(master)
        state = part.state[master]
        if "step" not in state:
            on_device = group.get("fused") or group.get("capturable")
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device if on_device else "cpu")
            for name in MOMENTS:
                state[name] = torch.zeros_like(master, memory_format=torch.preserve_format, requires_grad=False)
        return master, part, state

    def steps(self) -> set[float]:
        """Return the step counters that exist."""
        states = [part.state[master] for master, (part, _) in self._home.items() if master in part.state]
        return {float(state["step"]) for state in states if "step" in state}


def _groups_of_all_ranks(members: Sequence[DistributedOptimizer]) -> list[dict[str, Any]]:
    """Gather the parameter groups of all ranks, each role once, with their common step counter.

    A rank may lack some groups: a pipeline stage may have no experts, or no trained parameters.

    Raises:
        DataError: parameters have different step counters.
    """
    own = {
        "steps": set().union(*(LiveStates(member).steps() for member in members)),
        "groups": [
            {name: group[name] for name in (*param_group_identifier_keys, *GROUP_NUMBERS) if name in group}
            for member in members
            for group in member.optimizer.param_groups
        ],
    }
    everyone = gather_objects(own)
    steps = set().union(*(rank["steps"] for rank in everyone))
    if len(steps) > 1:
        raise DataError(f"parameters of one optimizer have different step counters: {sorted(steps)}")
    step = max(steps, default=0.0)
    by_role = {_role(group): {**group, "step": step} for rank in reversed(everyone) for group in rank["groups"]}
    return list(by_role.values())


def _role(group: dict[str, Any], ignored: tuple[str, ...] = ()) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in param_group_identifier_keys if key not in ignored)


def _groups_in(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the saved parameter groups, including those of chained optimizers with separate entries."""
    for part in (state, *(value for name, value in state.items() if name.isdigit())):
        yield from part.get("optimizer", {}).get("param_groups", [])


def _slot(parameter: torch.nn.Parameter, name: str) -> str:
    """Return a key that is unique in this process; on disk, layers share a key and differ in the offset."""
    return f"{name}.{id(parameter)}"


def _like(entry: Entry, name: str, data: torch.Tensor) -> Entry:
    """Return the model's sharded entry of a parameter, renamed and filled with one of its optimizer states."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{name}.{entry.key}", "data": data}
    if isinstance(entry, ShardedTensor):
        changes["dtype"] = data.dtype
    return replace(entry, **changes)


@torch.no_grad()
def _member_tensors(member: DistributedOptimizer, entries: Entries) -> dict[str, Entry]:
    tensors: dict[str, Entry] = {}
    group, live = member.data_parallel_group, LiveStates(member)
    for bucket in buckets(member):
        for name in STATE_NAMES:
            share = torch.zeros(bucket.size // group.size(), dtype=torch.float32, device=bucket.device)
            for parameter, ranges in bucket.local.items():
                where = ranges["gbuf_local"]
                share[where.start : where.end] = live.read(parameter, name)
            whole = torch.empty(bucket.size, dtype=torch.float32, device=bucket.device)
            dist.all_gather_into_tensor(whole, share, group=group)
            for parameter, place in bucket.ranges.items():
                entry = entries[parameter]
                if is_main_replica(entry.replica_id):  # the other replicas are not written
                    data = whole[place].view(parameter.shape).to("cpu", copy=True)
                    tensors[_slot(parameter, name)] = _like(entry, name, data)
    return tensors


def _frozen_layers(members: Sequence[DistributedOptimizer], entries: Entries) -> dict[str, Entry]:
    """Return the state that completes tensors of which other layers are trained: weights as they are, moments of 0.

    On disk one tensor holds a parameter of all layers, and cannot be written without the layers that are frozen.
    Collective.
    """
    trained = {parameter for member in members for bucket in buckets(member) for parameter in bucket.ranges}
    keys = set().union(*gather_objects({entries[parameter].key for parameter in trained}))
    return {
        _slot(parameter, name): _like(entry, name, data if name == MASTER else torch.zeros_like(data))
        for parameter, entry in entries.items()
        if entry.key in keys and parameter not in trained and is_main_replica(entry.replica_id)
        for data in [parameter.detach().to("cpu", torch.float32, copy=True)]
        for name in STATE_NAMES
    }


def _request(member: DistributedOptimizer, entries: Entries) -> dict[str, Entry]:
    """Return empty tensors for the parameters that this rank holds a part of; they are read whole and sliced later."""
    return {
        _slot(parameter, name): _like(entries[parameter], name, torch.empty(parameter.shape, dtype=torch.float32))
        for bucket in buckets(member)
        for parameter in bucket.local
        for name in STATE_NAMES
    }


@torch.no_grad()
def _restore_member(
    member: DistributedOptimizer,
    tensors: dict[str, torch.Tensor],
    saved_groups: list[dict[str, Any]],
    keep_learning_rates: bool,
) -> None:
    steps = {group["step"] for group in saved_groups}
    if len(steps) != 1:
        raise DataError(f"parameter groups of the checkpoint have different step counters: {sorted(steps)}")
    (step,) = steps
    kept = ("max_lr", "min_lr") if keep_learning_rates else ()
    for group in member.optimizer.param_groups:
        saved = _matching_group(group, saved_groups)
        group.update({name: saved[name] for name in GROUP_NUMBERS if name in saved and name not in kept})
    live = LiveStates(member)
    for bucket in buckets(member):
        for parameter, ranges in bucket.local.items():
            live.set_step(parameter, step)
            held_range = ranges["param"]
            for name in STATE_NAMES:
                whole = tensors[_slot(parameter, name)].flatten()
                live.write(parameter, name, whole[held_range.start : held_range.end])


def _matching_group(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the saved group with the same role.  Experts have separate groups only if EP or ETP is above 1."""
    for ignored in ((), ("is_expert_parallel",)):
        for candidate in saved:
            if _role(candidate, ignored) == _role(group, ignored):
                return candidate
    role = {key: group.get(key) for key in param_group_identifier_keys}
    raise DataError(
        f"the checkpoint has no optimizer parameter group like {role}. Load the weights alone with --no-load-optim, "
        "or resume with the --lr, --min-lr, --weight-decay and --*-lr-mult of the run that saved it."
    )
