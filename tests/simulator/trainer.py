"""The trainer's ranks: slime's own parts (saves, publishing, pushes) run; a model is the number of a state.

A state is the sequence of trained rollouts; ranks, lives and runs that trained the same have the same
number.  Collectives meet in virtual time, and break when a rank dies.
"""

from __future__ import annotations

import functools
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils import checkpoint
from slime.backends.megatron_utils.actor import MegatronTrainRayActor
from slime.backends.megatron_utils.checkpoints.checkpoint_reader import FORMAT_FILE
from slime.backends.megatron_utils.checkpoints.checkpoint_writer import BackgroundSave
from slime.backends.megatron_utils.update_weight.updater import WeightUpdater
from slime.ext.fast_push.carrier import NO_BUCKET, CarriedPush, Carrier
from slime.ext.fast_push.engine_verbs import receive_weight_bucket
from slime.ext.fast_push.manifest import BucketEntry, BucketSlice, Manifest, TensorEntry
from slime.ext.fast_push.verified_push import VerifiedPush
from slime.flags.checkpoint import inspect_checkpoint, version_before
from slime.utils.errors import DataError
from slime.weights.push.participants import reason_of, start_all, wait_together
from slime.weights.push.state import TrainerRanks
from slime.weights.tensor_slice import TensorSlice
from tests.simulator.kernel import _KERNEL, WORLD, Process
from tests.simulator.weight_groups import state_in

NUM_BUCKETS = 2


def make_manifest() -> Manifest:
    """Two tensors, each in a bucket of its own."""
    tensors = tuple(TensorEntry(f"t{k}", (8,), "bfloat16") for k in range(NUM_BUCKETS))
    whole = TensorSlice.whole((8,))
    return Manifest(tensors, tuple(BucketEntry(16, (BucketSlice(t.name, 0, whole),)) for t in tensors))


MANIFEST = make_manifest()


class Meeting:
    """The ranks of one incarnation of a trainer, in one group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: dict[int, dict[int, Any]] = {}
        self.counts: dict[int, int] = {}
        self.members: dict[int, Process] = {}
        self.waiting: list[Any] = []

    def gather(self, rank: int, own: Any, *, timeout_s: float) -> list[Any]:
        """Return the contributions of all ranks.

        Raises:
            RuntimeError: a rank has died, or the time is over.
        """
        kernel = _KERNEL[0]
        assert kernel is not None and kernel.current_process is not None
        if self.size == 1:
            return [own]
        if rank not in self.members:
            self.members[rank] = kernel.current_process
            kernel.current_process.on_death[self._broken] = None
        number = self.counts[rank] = self.counts.get(rank, -1) + 1
        call = self.calls.setdefault(number, {})
        call[rank] = own
        if len(call) == self.size:
            self._wake()
        deadline_s = kernel.now_s + timeout_s
        while len(call) < self.size:
            if any(not member.is_alive for member in self.members.values()):
                raise RuntimeError("Connection closed by peer")
            if kernel.now_s >= deadline_s:
                raise RuntimeError(f"[gloo] Timed out waiting {timeout_s:.0f} s for a collective")
            self.waiting.append(kernel.current)
            kernel.park(deadline_s - kernel.now_s, f"a collective (rank {rank})")
        return [call[k] for k in range(self.size)]

    def _wake(self) -> None:
        kernel, waiting, self.waiting = _KERNEL[0], self.waiting, []
        assert kernel is not None
        for strand in waiting:
            kernel.wake(strand)

    def _broken(self) -> None:
        kernel = _KERNEL[0]
        assert kernel is not None
        kernel.call_later(kernel.draw("connection breaks", 0.001, 2.0), self._wake)


class Dist:
    """torch.distributed for the running strand's rank."""

    @staticmethod
    def _trainer() -> Any:
        kernel = _KERNEL[0]
        assert kernel is not None
        return kernel.current_process.trainer  # type: ignore[union-attr]

    def is_in_background(self) -> bool:
        """Whether the running strand is not the one that serves the driver."""
        return "checkpoint writer" in _KERNEL[0].current.name  # type: ignore[union-attr]

    def get_rank(self, group: Any = None) -> int:
        return self._trainer().rank

    def get_world_size(self, group: Any = None) -> int:
        return self._trainer().world_size

    def new_group(self, *_: Any, **__: Any) -> str:
        trainer = self._trainer()
        trainer.num_groups += 1
        return f"group {trainer.num_groups}"

    def _gather(self, own: Any, group: Any) -> list[Any]:
        trainer = self._trainer()
        return trainer.meeting(group or "all").gather(trainer.rank, own, timeout_s=trainer.collective_timeout_s)

    def all_gather_object(self, told: list[Any], own: Any, group: Any = None) -> None:
        told[:] = self._gather(own, group)

    def broadcast_object_list(self, told: list[Any], src: int = 0, group: Any = None) -> None:
        told[:] = self._gather(list(told), group)[src]

    def barrier(self, group: Any = None, **_: Any) -> None:
        self._gather(None, group)


class Stub:
    """Does nothing, whatever is called."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Model:
    """A model: the number of its state."""

    def __init__(self, state: int) -> None:
        self.state = state


@functools.lru_cache(maxsize=256)
def bytes_of_state(state: int) -> torch.Tensor:
    """Return a bucket of a state; read-only."""
    return torch.tensor([state] * 2).view(torch.uint8)


class Buckets:
    """The model's weights, as the buckets of a push: each is the number of the state, twice."""

    def __init__(self, model: Model) -> None:
        self._model, self.manifest, self._sent = model, MANIFEST, {}
        self.constant_digests: dict[int, int] = {}
        self.source = self

    def iter_buckets(self, *, with_constants: bool = True) -> Iterator[tuple[int, Any]]:
        for index in range(NUM_BUCKETS):
            self._sent[index] = WORLD[0].digest(self._model.state, index)
            yield index, bytes_of_state(self._model.state)

    def digests(self) -> dict[int, int]:
        sent, self._sent = self._sent, {}
        return sent


class MessageCarrier(Carrier):
    """Rank 0 asks every engine to load a bucket and waits for all."""

    def open(self, push: CarriedPush, manifest: Manifest) -> None:
        push.meet("opening")

    def send(self, push: CarriedPush, index: int, flat: Any) -> None:
        if index == NO_BUCKET or push.ranks.rank != 0:
            return
        WORLD[0].wire[push.id, index] = state_in(flat)
        requests = start_all(push.participants.good, lambda e: e.run(receive_weight_bucket, push.id, index, ""))
        for engine, error in wait_together(requests, push.participants.clock.step_s).items():
            push.participants.exclude(engine, f"{reason_of(error)} (while loading bucket {index})")


class FixedPush(VerifiedPush):
    """Pushes buckets that do not come from a model."""

    fixed: Any

    @property
    def buckets(self) -> Any:
        return self.fixed


class Updater(WeightUpdater):
    """slime's own updater, of a model without tensors."""

    def __init__(self, args: Namespace, model: Model, first_version: int) -> None:
        super().__init__(args, [], lambda: None, hf_config={}, first_version=first_version, make_transport=self._make)
        self._simulated = Buckets(model)

    def _make(self, args: Namespace, ranks: TrainerRanks) -> FixedPush:
        is_real = WORLD[0].setup.broadcast or args.update_weight_transport == "disk"
        made = FixedPush.of(args, ranks) if is_real else FixedPush(MessageCarrier(ranks), ranks)
        made.fixed = self._simulated
        return made

    def _weights_in(self, dtype: torch.dtype) -> Any:
        return Namespace(dtype=dtype)

    def _estimate_cast_loss(self, push: CarriedPush) -> None:
        pass


class SimulatedTrainer(MegatronTrainRayActor):
    """One rank: slime's verbs over a model that is a number."""

    num_groups = 0

    def set_rendezvous(self, world_size: int, rank: int, address: str, port: int, local_rank: int = 0) -> None:
        self.rank, self.world_size = rank, world_size
        self._incarnation = (address, port)
        kernel = _KERNEL[0]
        assert kernel is not None and kernel.current_process is not None
        kernel.current_process.trainer = self  # type: ignore[attr-defined]
        WORLD[0].cluster.roles[kernel.current_process] = f"trainer{rank}"

    def meeting(self, group: str) -> Meeting:
        meetings = WORLD[0].meetings
        key = (self._incarnation, group)
        if key not in meetings:
            meetings[key] = Meeting(self.world_size)
        return meetings[key]

    def _meet(self, own: Any = None) -> list[Any]:
        return self.meeting("all").gather(self.rank, own, timeout_s=self.collective_timeout_s)

    def init(
        self,
        args: Namespace,
        role: str,
        with_ref: bool = False,
        transforms: tuple[type, ...] = (),
        transport: Any = None,
        guides: tuple[type, ...] = (),
    ) -> int:
        world, kernel = WORLD[0], _KERNEL[0]
        assert kernel is not None
        self.args, self.role = args, role
        self.collective_timeout_s = args.distributed_timeout_minutes * 60.0
        self._meet()
        kernel.sleep(kernel.draw("load", 0.2, 3.0))
        state, iteration = load(args, self.world_size)
        if len({s for s, _ in self._meet((state, iteration))}) != 1:
            world.violate("the ranks loaded different checkpoints")
        self.model, self.optimizer, self.scheduler = [Model(state)], None, None
        self.weights = self._reports = self._policies = Stub()
        self._last_rollout_id: int | None = None
        self._sleep = Stub()
        self._background_save = BackgroundSave(self._publish) if args.async_save else None
        self._start_rollout_id = args.start_rollout_id if args.start_rollout_id is not None else iteration + 1
        folders, at_least = (args.load, args.save), args.update_weight_start_version
        first_version = version_before(self._start_rollout_id, folders, at_least=at_least)
        self._updater = Updater(args, self.model[0], first_version=first_version)
        return self._start_rollout_id

    def get_parallel_config(self) -> dict[str, int]:
        return {
            "dp_size": self.world_size, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1,
            "dp_rank": self.rank, "cp_rank": 0, "is_last_stage": 1,
        }  # fmt: skip

    def clear_memory(self) -> None:
        pass

    def train(self, rollout_id: int, rank_batch: Any, external_data: Any = None) -> Any:
        world, kernel = WORLD[0], _KERNEL[0]
        assert kernel is not None
        kernel.sleep(kernel.draw("train", 0.5, 4.0))
        shares = self._meet(world.samples_of(rank_batch))
        world.at(f"train {rollout_id % 2}", kernel.current_process)
        kernel.sleep(0.1)
        samples = [sample for share in shares for sample in share]
        self._meet()
        model = self.model[0]
        model.state = world.trained(model.state, rollout_id, samples, is_main=self.rank == 0)
        self._updater.record_weights_changed()
        self._last_rollout_id = rollout_id
        return {"loss": 0.0} if self.rank == 0 else None


# Checkpoints


def split(state: dict[str, Any]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The shards of this rank: ``checkpoint_writer._split``."""
    return {"model": [state["model"]]}, {}


def write(shards: dict[str, list[Any]], common: bytes, folder: Path, group: Any, *_: Any) -> None:
    """Write the files of all ranks, then the one that completes the checkpoint: ``checkpoint_writer._write``."""
    dist, kernel = Dist(), _KERNEL[0]
    assert kernel is not None
    # In the background a checkpoint may take long.
    kernel.sleep(kernel.draw("write", 0.05, 30.0 if dist.is_in_background() else 2.0))
    error = ""
    try:
        content = json.dumps({"state": shards["model"][0], "end": True}).encode()
        WORLD[0].files.write(folder / f"__{dist.get_rank()}_0.distcp", content)
    except OSError as raised:
        error = str(raised)
    told: list[Any] = [None]
    dist.all_gather_object(told, error, group=group)
    if any(told):
        raise DataError(f"The checkpoint {folder} could not be written: {max(told)}")
    verdict = [""]
    if dist.get_rank() == 0:
        try:
            WORLD[0].files.write(folder / f"{FORMAT_FILE}.tmp", b"{}")
            (folder / f"{FORMAT_FILE}.tmp").replace(folder / FORMAT_FILE)
        except OSError as raised:
            verdict = [str(raised)]
    dist.broadcast_object_list(verdict, group=group)
    if verdict[0]:
        raise DataError(f"The checkpoint {folder} could not be written: {verdict[0]}")


def load(args: Namespace, world_size: int) -> tuple[int, int]:
    """Return state and iteration of the checkpoint named by ``--load``."""
    if args.load is None or not (Path(args.load) / checkpoint.TRACKER).exists():
        return WORLD[0].disk_state, 0
    found = inspect_checkpoint(args.load, "--load", args.ckpt_step)
    folder, iteration = found.folder, found.iteration
    states = set()
    for rank in range(world_size):
        try:
            states.add(json.loads((folder / f"__{rank}_0.distcp").read_bytes())["state"])
        except (OSError, ValueError) as error:
            WORLD[0].violate(f"the checkpoint {folder.name} cannot be loaded: {type(error).__name__}: {error}")
            raise
    if len(states) != 1:
        WORLD[0].violate(f"the parts of checkpoint {folder.name} are of different states")
    return states.pop(), int(iteration)


def patch_trainer(patches: Any) -> None:
    """Redirect collectives, and code that touches tensors, to this module."""
    from slime.backends.megatron_utils import memory
    from slime.backends.megatron_utils.checkpoints import checkpoint_writer
    from slime.backends.megatron_utils.update_weight import updater
    from slime.ext.fast_push.disk import disk, versions
    from slime.utils import distributed_utils
    from slime.weights.push import state

    dist = Dist()
    actor = __import__("slime.backends.megatron_utils.actor", fromlist=["actor"])
    for module in (checkpoint, checkpoint_writer, state, actor, updater, distributed_utils):
        patches.set(module, "dist", dist)
    patches.set(checkpoint_writer, "init_file_group", lambda: "files")
    patches.set(distributed_utils, "init_gloo_group", lambda: "gloo")
    patches.set(state, "get_gloo_group", lambda: "gloo")
    patches.set(actor, "get_gloo_group", lambda: "gloo")
    patches.set(checkpoint_writer, "_split", split)
    patches.set(checkpoint_writer, "_write", write)
    patches.set(checkpoint_writer, "_planner", lambda: None)
    patches.set(checkpoint, "common_state", lambda args, iteration: {})
    patches.set(checkpoint, "rng_state", lambda: None)
    patches.set(checkpoint, "model_state", lambda model: {"model": model[0].state})
    patches.set(
        updater,
        "trainer_ranks",
        lambda args: TrainerRanks(
            rank=dist.get_rank(), world_size=dist.get_world_size(), is_source=dist.get_rank() == 0
        ),
    )
    patches.set(disk, "copy_assets", lambda *_: None)
    patches.set(versions.secrets, "token_hex", lambda size: str(_KERNEL[0].rng("token").getrandbits(32)))  # type: ignore[union-attr]
    save = versions.save_tensors

    def save_tensors(path: Path, *content: Any) -> None:
        WORLD[0].files.at("write", str(path), half=lambda: path.write_bytes(b"half"))
        save(path, *content)

    patches.set(versions, "save_tensors", save_tensors)
    patches.set(memory, "freeze_long_lived_objects", lambda: None)
