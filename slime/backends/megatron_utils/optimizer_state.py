"""Optimizer state in checkpoints: one sharded tensor per model parameter and state, placed like the parameter.

megatron-core 0.16.1 over ``torch.optim.AdamW`` (what it uses without TransformerEngine and Apex) cannot load the state
that it saves: it puts ONE step counter into the state of all parameters, which AdamW then advances once a parameter
(``distrib_optimizer.py:821``), and with several gradient buckets it writes shifted values (``:1474``).  So the state
of the distributed optimizer is written and read here, through public calls.  Since every tensor is stored whole and
sliced on load, TP, PP, EP, DP and the bucket sizes may change between save and load.  The tensors have the names of
the wheel's ``fully_reshardable`` format: ``optimizer.state.{param, exp_avg, exp_avg_sq}.<parameter>``.

    state = {"model": module.sharded_state_dict()}
    state["optimizer"] = optimizer_state(optimizer, state)       # collective
    ...
    load_optimizer_state(optimizer, state, path)                 # collective; the weights are loaded before

Optimizers that are not distributed are right in the wheel and are left to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, param_group_identifier_keys

from slime.utils.errors import DataError

Entry: TypeAlias = ShardedTensor | ShardedTensorFactory
Entries = dict[torch.nn.Parameter, Entry]

MASTER, MOMENTS = "param", ("exp_avg", "exp_avg_sq")
STATE_NAMES = (MASTER, *MOMENTS)
"""Per parameter: the fp32 master weight and Adam's two moments."""


class Part(NamedTuple):
    """A parameter of a gradient bucket, and where it lies."""

    start: int
    """First element of the parameter in the bucket (the bucket may have padding between parameters)."""
    end: int


class Bucket(NamedTuple):
    """One gradient bucket of a distributed optimizer: all ranks of the group hold an equal share of it."""

    size: int
    device: torch.device
    parts: dict[torch.nn.Parameter, Part]
    """Every parameter of the bucket."""
    local: dict[torch.nn.Parameter, dict[str, Any]]
    """Parameters of which this rank's share holds something -> the wheel's ranges of it."""


def optimizer_state(optimizer: MegatronOptimizer, model_state: dict[str, Any]) -> dict[str, Any]:
    """The sharded state of an optimizer, for ``dist_checkpointing.save``.  Collective.

    Args:
        optimizer: what ``get_megatron_optimizer`` returned.
        model_state: the sharded state of the *live* model; entries are matched by parameter identity.
    """
    members = _members(optimizer)
    entries = _model_entries(model_state)
    ours = [member for member in members if _is_ours(member)]
    steps = dict(zip(map(id, ours), _agreed_steps(ours), strict=True))
    return {
        str(index): _member_state(member, steps[id(member)], entries)
        if id(member) in steps
        else member.sharded_state_dict(model_state)
        for index, member in enumerate(members)
    }


def load_optimizer_state(
    optimizer: MegatronOptimizer, model_state: dict[str, Any], path: str, *, keep_learning_rates: bool = True
) -> None:
    """Restore an optimizer from the checkpoint at ``path``.  Collective.

    The weights must have been loaded before: fp32 master weights are views of them.

    Args:
        optimizer: a fresh one.
        model_state: the sharded state of the live model.
        path: the checkpoint's folder.
        keep_learning_rates: the bounds of the learning rate stay those of this run's flags.

    Raises:
        DataError: the checkpoint's parameter groups do not fit the optimizer's.
    """
    members = _members(optimizer)
    entries = _model_entries(model_state)
    request = {
        str(index): {"param_state": _request(member, entries)}
        if _is_ours(member)
        else member.sharded_state_dict(model_state, is_loading=True)
        for index, member in enumerate(members)
    }
    # Each rank asks for the parameters it holds a part of, so "each tensor is asked for once" does not hold.
    loaded = dist_checkpointing.load({"optimizer": request}, path, validate_access_integrity=False)["optimizer"]
    saved_groups = [
        group for state in loaded.values() if "optimizer" in state for group in state["optimizer"]["param_groups"]
    ]
    for index, member in enumerate(members):
        if _is_ours(member):
            _restore_member(member, loaded[str(index)], saved_groups, keep_learning_rates)
        else:
            member.load_state_dict(loaded[str(index)])


def _members(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Experts have an optimizer of their own, chained to that of the dense parameters."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _is_ours(member: MegatronOptimizer) -> bool:
    """Whether this module, not the wheel, keeps the member's state."""
    return isinstance(member, DistributedOptimizer) and type(member.optimizer) in (torch.optim.Adam, torch.optim.AdamW)


def _model_entries(model_state: dict[str, Any]) -> Entries:
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    return {entry.data: entry for entry in nested_values(sharded)}


def _buckets(member: DistributedOptimizer) -> Iterator[Bucket]:
    for buffer, ranges in zip(member.buffers, member.gbuf_ranges, strict=True):
        (per_bucket,) = ranges.values()
        for index, (bucket, local) in enumerate(zip(buffer.buckets, per_bucket, strict=True)):
            # The buffer's offsets include padding; relative to the bucket they are right on every rank.
            parts = {
                parameter: Part(start - bucket.offset, end - bucket.offset)
                for parameter, (start, end, where) in buffer.param_index_map.items()
                if where == index
            }
            yield Bucket(bucket.grad_data.numel(), bucket.grad_data.device, parts, local["param_map"])


def _live_state(member: DistributedOptimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """This rank's flat slices of one parameter: master weight, moments, and its own step counter.

    Adam's state is created the way Adam does at its first step, if it is not there yet.
    """
    group_index, order = member.model_param_group_index_map[parameter]
    group = member.optimizer.param_groups[group_index]
    master = group["params"][order]
    state = member.optimizer.state[master]
    if not state:
        on_device = group.get("fused") or group.get("capturable")
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device if on_device else "cpu")
        for name in MOMENTS:
            state[name] = torch.zeros_like(master, memory_format=torch.preserve_format, requires_grad=False)
    return {MASTER: master.detach(), "step": state["step"], **{name: state[name] for name in MOMENTS}}


def _agreed_steps(members: list[DistributedOptimizer]) -> list[float]:
    """The step counter of each member, agreed by all ranks: a rank may hold no parameter of a member."""
    own = []
    for member in members:
        counters = {float(state["step"]) for state in member.optimizer.state.values() if state}
        if len(counters) > 1:
            raise DataError(f"parameters of one optimizer have different step counters: {sorted(counters)}")
        own.append(counters.pop() if counters else 0.0)
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    return [max(steps) for steps in zip(*everyone, strict=True)]


def _slot(parameter: torch.nn.Parameter, name: str) -> str:
    """Key within this process only.  On disk layers share a key and differ in the offset."""
    return f"{name}.{id(parameter)}"


def _like(entry: Entry, name: str, data: torch.Tensor) -> Entry:
    """The model's entry, renamed and filled with a state of the parameter."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{name}.{entry.key}", "data": data}
    if isinstance(entry, ShardedTensor):
        changes["dtype"] = data.dtype
    return replace(entry, **changes)


@torch.no_grad()
def _member_state(member: DistributedOptimizer, step: float, entries: Entries) -> dict[str, Any]:
    tensors: dict[str, Entry] = {}
    group = member.data_parallel_group
    for bucket in _buckets(member):
        for name in STATE_NAMES:
            share = torch.zeros(bucket.size // group.size(), dtype=torch.float32, device=bucket.device)
            for parameter, ranges in bucket.local.items():
                where = ranges["gbuf_local"]
                share[where.start : where.end] = _live_state(member, parameter)[name]
            whole = torch.empty(bucket.size, dtype=torch.float32, device=bucket.device)
            dist.all_gather_into_tensor(whole, share, group=group)
            for parameter, part in bucket.parts.items():
                entry = entries[parameter]
                if is_main_replica(entry.replica_id):  # the other replicas are not written
                    data = whole[part.start : part.end].view(parameter.shape).to("cpu", copy=True)
                    tensors[_slot(parameter, name)] = _like(entry, name, data)
    groups = [{k: v for k, v in g.items() if k != "params"} | {"step": step} for g in member.optimizer.param_groups]
    state: dict[str, Any] = {"optimizer": {"param_groups": groups}, "param_state": tensors}
    if member.grad_scaler:
        state["grad_scaler"] = member.grad_scaler.state_dict()
    return state


def _request(member: DistributedOptimizer, entries: Entries) -> dict[str, Entry]:
    """Empty tensors for the parameters of which this rank holds a part; each is read whole and sliced afterwards."""
    return {
        _slot(parameter, name): _like(entries[parameter], name, torch.empty(parameter.shape, dtype=torch.float32))
        for bucket in _buckets(member)
        for parameter in bucket.local
        for name in STATE_NAMES
    }


@torch.no_grad()
def _restore_member(
    member: DistributedOptimizer, state: dict[str, Any], saved_groups: list[dict[str, Any]], keep_learning_rates: bool
) -> None:
    steps = {group["step"] for group in saved_groups}
    if len(steps) != 1:
        raise DataError(f"parameter groups of the checkpoint have different step counters: {sorted(steps)}")
    (step,) = steps
    for group in member.optimizer.param_groups:
        saved = _matching_group(group, saved_groups)
        kept = {"step", "is_expert_parallel", *(("max_lr", "min_lr") if keep_learning_rates else ())}
        group.update({k: v for k, v in saved.items() if k not in kept})
    for bucket in _buckets(member):
        for parameter, ranges in bucket.local.items():
            live = _live_state(member, parameter)
            live["step"].fill_(step)
            piece = ranges["param"]
            for name in STATE_NAMES:
                live[name].copy_(state["param_state"][_slot(parameter, name)].flatten()[piece.start : piece.end])
    if member.grad_scaler and "grad_scaler" in state:
        member.grad_scaler.load_state_dict(state["grad_scaler"])


def _matching_group(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The saved group of the same role.  Experts have groups of their own only when EP or ETP exceeds one."""
    for ignored in ((), ("is_expert_parallel",)):
        keys = [key for key in param_group_identifier_keys if key not in ignored]
        for candidate in saved:
            if all(candidate.get(key) == group.get(key) for key in keys):
                return candidate
    role = {key: group.get(key) for key in param_group_identifier_keys}
    raise DataError(
        f"the checkpoint has no optimizer parameter group like {role}. Load the weights alone with --no-load-optim, "
        "or resume with the --lr, --min-lr and --weight-decay flags of the run that saved it."
    )
