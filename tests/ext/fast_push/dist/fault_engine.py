"""Engines that fail on demand: the verbs of a two-phase push, strictly checked, in a process that may die.

``EngineHall`` is a process that forks engines, so that each costs milliseconds.  An engine holds a few tensors, loads
flat buckets into them as a manifest says, and acknowledges digests of the tensors it holds *now*, read back from them.
``FaultyEngine`` is the trainer's side, an ``EngineProxy``; every rank creates its own.

A fault is ``"<kind> <step>"``, for example ``"dies receive:in"``.  Steps are the verbs; ``receive`` has the points
``before`` (nothing done), ``in`` (before the broadcast, in which the others then wait), ``during`` (half of the
bucket is loaded) and ``after`` (loaded, not answered), the other verbs have ``before`` and ``after``.
"""

from __future__ import annotations

import base64
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.ext.fast_push.channel import WeightChannel
from slime.ext.fast_push.loaders import RECEIVER
from slime.utils.errors import EngineError, WeightSyncError
from slime.weights.digest import combine, digest_tensor
from slime.ext.fast_push.manifest import Manifest
from slime.weights.push.engine import EngineProxy

HALL_TIMEOUT_S = 60
FAULTY_BUCKET = 1
"""The bucket at which faults of ``receive`` happen; others are loaded before and after it."""
SLOW_S = 60.0


class EngineHall:
    """The process that forks engines.  Use as a context manager; the engines end with it."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "hall")

    def __enter__(self) -> EngineHall:
        command = [sys.executable, "-m", "tests.ext.fast_push.dist.fault_engine", self.address]
        self._process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
        connect(self.address).close()
        return self

    def __exit__(self, *error: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(HALL_TIMEOUT_S)


def start_engine(hall: str, tensors: dict[str, Tensor], *, num_gpus: int, version: str, fault: str = "") -> str:
    """Fork an engine that serves ``tensors`` as ``version``; return its address."""
    with connect(hall) as connection:
        connection.send_bytes(pickle.dumps((tensors, num_gpus, version, fault)))  # tensors by value
        return connection.recv()


def connect(address: str) -> Connection:
    """A connection to a process that may still be starting."""
    deadline = time.monotonic() + HALL_TIMEOUT_S
    while True:
        try:
            return Client(address)
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < deadline, f"nothing listens at {address}"
            time.sleep(0.005)


class _Answer:
    def __init__(self, engine: FaultyEngine, number: int) -> None:
        self._engine, self._number = engine, number

    def wait(self, timeout_s: float) -> Any:
        return self._engine.wait(self._number, timeout_s)


class FaultyEngine:
    """The engine at ``address``, as a weight sender sees it."""

    loaders = (RECEIVER,)
    dtype = ""
    gpus = EngineProxy.gpus

    def __init__(self, address: str, *, index: int, num_gpus: int, gpu_offset: int, is_colocated: bool) -> None:
        self.index, self.num_gpus, self.gpu_offset, self.is_colocated = index, num_gpus, gpu_offset, is_colocated
        self._address = address
        self._pipe = connect(address)
        self._numbers = itertools.count()
        self._answers: dict[int, tuple[Any, BaseException | None]] = {}

    def run(self, function: Callable[..., Any], /, *arguments: Any, on_all_nodes: bool = False) -> _Answer:
        return getattr(self, function.__name__)(*arguments)

    def __getattr__(self, name: str) -> Callable[..., _Answer]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*positional: Any, **keyword: Any) -> _Answer:
            number = next(self._numbers)
            try:
                self._pipe.send((number, name, positional, keyword))
            except OSError as error:
                raise EngineError(f"the engine is dead: {error}") from error
            return _Answer(self, number)

        return call

    def wait(self, number: int, timeout_s: float) -> Any:
        """The answer to request ``number``; keeps answers to other requests, ignores a second answer."""
        deadline = time.monotonic() + timeout_s
        while number not in self._answers:
            if not self._pipe.poll(max(deadline - time.monotonic(), 0)):
                raise EngineError(f"no answer within {timeout_s:.1f} s")
            try:
                answered, value, error = self._pipe.recv()
            except (EOFError, OSError) as lost:
                raise EngineError(f"the engine died: {lost!r}") from lost
            self._answers.setdefault(answered, (value, error))
        value, error = self._answers[number]
        if error is not None:
            raise error
        return value

    def state(self) -> dict[str, Any] | None:
        """What the engine is doing, even while it works; None if it is dead."""
        try:
            with Client(self._address) as connection:
                connection.send((0, "state", (), {}))
                return connection.recv()[1]
        except (OSError, EOFError):
            return None

    def close(self) -> None:
        self._pipe.close()


class HoldingEngine:
    """The engine's side."""

    def __init__(self, tensors: dict[str, Tensor], num_gpus: int, version: str, fault: str) -> None:
        self.held = [{name: tensor.clone() for name, tensor in tensors.items()} for _ in range(num_gpus)]
        self.version, self.fault = version, fault
        self.is_paused = False
        self.push_id: str | None = None
        self.acknowledged: str | None = None
        self.manifest: Manifest | None = None
        self.mapped: dict[str, Tensor] = {}
        self.loaded: set[int] = set()
        self.problems: list[str] = []
        self.channels: dict[str, list[WeightChannel]] = {}
        self.served: list[tuple[str, list[int]]] = []
        self.note_served()

    # What the test asks

    def note_served(self) -> None:
        self.served.append((self.version, self.digest()))

    def digest(self) -> list[int]:
        """One number for each GPU's tensors."""
        return [combine(digest_tensor(tensor) for _, tensor in sorted(held.items())) for held in self.held]

    def state(self) -> dict[str, Any]:
        return {"is_paused": self.is_paused, "version": self.version, "digest": self.digest(), "served": self.served}

    def at(self, point: str) -> None:
        """The place of a fault."""
        kind, _, where = self.fault.partition(" ")
        if where != point:
            return
        if kind == "dies":
            os._exit(1)
        if kind == "slow":
            time.sleep(SLOW_S)
        if kind == "refuses":
            raise WeightSyncError("out of memory")

    # The verbs

    def pause_generation(self) -> None:
        self.at("pause:before")
        self.is_paused = True
        self.at("pause:after")

    def flush_cache(self) -> None:
        self.at("flush:before")

    def continue_generation(self) -> None:
        self.at("continue:before")
        if self.push_id is not None:
            raise WeightSyncError("an unfinished push must not be served")
        self.is_paused = False
        self.note_served()
        self.at("continue:after")

    def begin_weight_update(
        self, manifest_id: str, push_id: str, manifest_json: str | None = None, loader: str = RECEIVER
    ) -> Any:
        self.at("begin:before")
        manifest = self.manifest if manifest_json is None else Manifest.from_json(manifest_json)
        if manifest is None or manifest.id != manifest_id:
            return None
        assert {(t.name, t.shape) for t in manifest.tensors} == {
            (name, tuple(tensor.shape)) for name, tensor in self.held[0].items()
        }
        self.manifest, self.push_id, self.acknowledged = manifest, push_id, None
        self.loaded, self.problems = set(), []
        self.at("begin:after")
        return [""] * len(manifest.buckets)

    def receive_weight_bucket(self, push_id: str, bucket_index: int, group_name: str) -> None:
        assert self.manifest is not None
        self.begin_receive(push_id, bucket_index)
        if bucket_index == FAULTY_BUCKET:
            self.at("receive:in")
        size = self.manifest.buckets[bucket_index].num_bytes
        flats = [torch.empty(size, dtype=torch.uint8) for _ in self.held]
        try:
            _all_at_once(
                [
                    lambda channel=channel, flat=flat: channel.broadcast(flat)
                    for channel, flat in zip(self.channels[group_name], flats, strict=True)
                ]
            )
        except WeightSyncError as error:  # our loader does not raise inside the engine: it reports
            self.problems.append(f"bucket {bucket_index}: {error}")
            return
        self.load_received(bucket_index, flats)

    def receive_weight_buckets(self, push_id: str, payloads: dict[int, list[str]]) -> None:
        for bucket_index, payload in payloads.items():
            self.begin_receive(push_id, bucket_index)
            self.load_received(bucket_index, [self.map(handle) for handle in payload])

    def map(self, handle: str) -> Tensor:
        """Map a buffer of the trainer, whose handle may be used once."""
        if handle not in self.mapped:
            self.mapped[handle] = pickle.loads(base64.b64decode(handle))
        return self.mapped[handle]

    def begin_receive(self, push_id: str, bucket_index: int) -> None:
        self.require(push_id)
        self.acknowledged = None
        if bucket_index == FAULTY_BUCKET:
            self.at("receive:before")

    def load_received(self, bucket_index: int, flats: list[Tensor]) -> None:
        is_faulty = bucket_index == FAULTY_BUCKET
        for _ in range(2 if is_faulty and self.fault == "twice receive" else 1):
            self.load(bucket_index, flats, is_faulty=is_faulty)
        if is_faulty:
            self.at("receive:after")

    def load(self, bucket_index: int, flats: list[Tensor], *, is_faulty: bool) -> None:
        assert self.manifest is not None
        slices = self.manifest.buckets[bucket_index].slices
        if is_faulty and self.fault == "loses receive":
            return
        for held, flat in zip(self.held, flats, strict=True):
            for position, part in enumerate(slices):
                if is_faulty and position == len(slices) // 2:
                    self.at("receive:during")
                place = part.slice.of(held[part.name])
                length = place.numel() * place.element_size()
                data = flat[part.offset : part.offset + length].clone()
                if is_faulty and position == 0 and self.fault == "corrupts receive":
                    data[0] ^= 1
                place.copy_(data.view(place.dtype).view(place.shape))
        self.loaded.add(bucket_index)

    def acknowledge_weight_update(self, push_id: str) -> dict[str, Any]:
        self.at("acknowledge:before")
        assert self.manifest is not None
        self.require(push_id)
        buckets = []
        for index, bucket in enumerate(self.manifest.buckets):
            digests = {combine(digest_tensor(p.slice.of(held[p.name])) for p in bucket.slices) for held in self.held}
            if len(digests) > 1:
                self.problems.append(f"the GPUs hold different bytes of bucket {index}")
            buckets.append(f"{min(digests):016x}" if index in self.loaded else "")
        if self.fault == "complains acknowledge":
            self.problems.append("lm_head.weight was never written")
        self.acknowledged = push_id
        answered = "an-earlier-push" if self.fault == "stale acknowledge" else push_id
        self.at("acknowledge:after")
        return {"push_id": answered, "buckets": buckets, "problems": self.problems}

    def commit_weight_update(self, push_id: str, weight_version: str) -> None:
        self.at("commit:before")
        self.require(push_id)
        if self.acknowledged != push_id:
            raise WeightSyncError("not acknowledged")
        if self.fault != "forgets commit":
            self.version = "7777" if self.fault == "mislabels commit" else weight_version
        self.push_id = None
        self.at("commit:after")

    def get_weight_version(self) -> str:
        self.at("version:before")
        return self.version

    def join_weight_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        loader: str = RECEIVER,
    ) -> None:
        self.at("join:before")
        channels: list[WeightChannel | None] = [None] * len(self.held)

        def join(position: int) -> None:
            channels[position] = WeightChannel(
                master_address, master_port, rank=rank_offset + position, world_size=world_size, backend=backend,
                timeout_s=30,
            )  # fmt: skip

        _all_at_once([lambda position=position: join(position) for position in range(len(self.held))])
        self.channels[group_name] = channels  # type: ignore[assignment]
        self.at("join:after")

    def leave_weight_group(self, group_name: str) -> None:
        for channel in self.channels.pop(group_name, []):
            channel.leave()

    def require(self, push_id: str) -> None:
        if push_id != self.push_id:
            raise WeightSyncError(f"asked about push {push_id}, the one begun last is {self.push_id}")


def _all_at_once(work: list[Callable[[], None]]) -> None:
    """Every GPU of an engine is a separate rank."""
    failed: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _serve(address: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    serve(address, HoldingEngine(*arguments))


def serve(address: str, engine: Any) -> None:
    """Answer requests for ``engine`` forever, from all ranks in turn."""
    turn = threading.Lock()
    with Listener(address, backlog=16) as listener:
        while True:
            threading.Thread(target=_answer, args=(listener.accept(), engine, turn), daemon=True).start()


def _answer(pipe: Connection, engine: Any, turn: threading.Lock) -> None:
    while True:
        try:
            number, name, positional, keyword = pipe.recv()
        except (EOFError, OSError):
            return
        if name == "state":
            pipe.send((number, engine.state(), None))
            continue
        with turn:
            try:
                answer = (number, getattr(engine, name)(*positional, **keyword), None)
            except Exception as error:  # the edge of the engine's process: the sender gets the error
                answer = (number, None, error if isinstance(error, WeightSyncError) else EngineError(repr(error)))
        try:
            pipe.send(answer)
            if engine.fault in (f"repeats {name}", f"repeats {name.removesuffix('s')}"):
                pipe.send(answer)
        except OSError:
            return


def _hall(address: str) -> None:
    numbers = itertools.count()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with Listener(address, backlog=16) as listener:
        while True:
            with listener.accept() as connection:
                try:
                    arguments = pickle.loads(connection.recv_bytes())
                except EOFError:
                    continue  # a check whether the engine is up
                engine_address = f"{address}-{next(numbers)}"
                if os.fork() == 0:
                    connection.close()
                    _serve(engine_address, arguments)
                connection.send(engine_address)


if __name__ == "__main__":
    _hall(sys.argv[1])
