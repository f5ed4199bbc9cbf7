"""Ray at its seam: actors are simulated processes; calls are messages that take time, are lost with their process, and
reach an actor in the order in which a caller sent them.
"""

from __future__ import annotations

import collections
import pickle
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import ray
from greenlet import GreenletExit
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from tests.simulator.kernel import _KERNEL, Kernel, Process

PLAIN = frozenset((str, int, float, bool, type(None)))
_THINGS: list[Any] = []
"""References and handles of the current schedule; pickled by number."""


def _thing(number: int) -> Any:
    return _THINGS[number]


class _Named:
    """An object that is passed by reference."""

    def __init__(self) -> None:
        self._number = len(_THINGS)
        _THINGS.append(self)

    def __reduce__(self) -> Any:
        return _thing, (self._number,)

    def __hash__(self) -> int:
        return self._number


def travel(value: Any) -> Any:
    """Return a value as it arrives in another process: a copy."""
    kind = type(value)
    if kind in PLAIN or (kind is tuple and PLAIN.issuperset(map(type, value))):
        return value
    if kind is tuple:
        return tuple(map(travel, value))
    if kind is dict and PLAIN.issuperset(map(type, value)) and PLAIN.issuperset(map(type, value.values())):
        return value.copy()
    if kind is Namespace:  # hundreds of flags, nearly all of them plain values
        copied = Namespace()
        flags = vars(copied)
        flags.update(vars(value))
        others = {name: flag for name, flag in flags.items() if type(flag) not in PLAIN}
        flags.update(pickle.loads(pickle.dumps(others, 5)))
        return copied
    return pickle.loads(pickle.dumps(value, 5))


class Ref(_Named):
    """ray.ObjectRef."""

    def __init__(self, owner: Any, method: str = "", actor_id: _Id | None = None) -> None:
        super().__init__()
        self._owner, self._method, self._actor_id = owner, method, actor_id or _Id("")
        self.is_done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.waiting: list[Any] = []

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        if self.is_done:
            return
        self.is_done, self.value, self.error = True, value, error
        kernel = _KERNEL[0]
        assert kernel is not None
        for strand in self.waiting:
            kernel.wake(strand)
        self.waiting.clear()

    def task_id(self) -> Any:
        return Namespace(actor_id=lambda: self._actor_id)

    def __repr__(self) -> str:
        return f"{self._owner}.{self._method}()" if self._method else str(self._owner)


class _Id:
    def __init__(self, text: str) -> None:
        self._text = text

    def hex(self) -> str:
        return self._text


class Handle(_Named):
    """An actor's handle; the actor itself is :attr:`instance` once its process has started."""

    def __init__(self, cluster: Cluster, process: Process, cls: type, groups: dict[str, int]) -> None:
        super().__init__()
        self._cluster, self._process, self._cls = cluster, process, cls
        self._limits = {"": 1, **groups}
        self._queues: dict[str, collections.deque[Any]] = {name: collections.deque() for name in self._limits}
        self._running = dict.fromkeys(self._limits, 0)
        self._instance: Any = None
        self._group_of: dict[str, str] = {}
        """The concurrency group of each called method."""
        self._open: dict[Ref, None] = {}
        self._arrival_s: dict[Any, float] = {}
        self._cause = "killed"
        self._failed: BaseException | None = None
        self._actor_id = _Id(f"{self._number:08x}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Method(self, name)

    def _died(self) -> None:
        """Running and later calls fail as soon as Ray has noticed."""
        cluster = self._cluster
        kernel = cluster.kernel

        def notice() -> None:
            text = f"The actor {self._process.name} died: {self._cause}"
            self._failed = self._failed or RayActorError(self._actor_id.hex(), text)
            for ref in list(self._open):
                ref.finish(error=self._failed)
            self._open.clear()

        kernel.call_later(kernel.draw(f"notice {self._process.name}", 0.01, 3.0), notice)

    def _pump(self, group: str) -> None:
        queue = self._queues[group]
        while (
            queue
            and self._running[group] < self._limits[group]
            and (self._instance is not None or queue[0][0] is None)
        ):
            self._running[group] += 1
            name, arguments, keywords, ref = queue.popleft()
            work = lambda n=name, a=arguments, k=keywords, r=ref: self._serve(group, n, a, k, r)  # noqa: E731
            self._cluster.kernel.spawn(self._process, work, name or "__init__")

    def _serve(self, group: str, name: str | None, arguments: Any, keywords: Any, ref: Ref) -> None:
        cluster = self._cluster
        # A fault hits the request that an actor runs, not the method that sends it.
        moment = arguments[0].__name__ if name == "run" else name
        try:
            if name is None:
                self._instance = self._cls(*arguments, **keywords)
                value = None
            else:
                cluster.at(f"call {cluster.role_of(self._process)}.{moment}", self._process)
                value = travel(getattr(self._instance, name)(*arguments, **keywords))
            error = None
        except GreenletExit:
            raise
        except Exception as raised:  # noqa: BLE001 - the caller gets it
            value, error = None, raised
        if error is not None and name is None:
            self._cause = f"its __init__ raised {type(error).__name__}: {error}"
            cluster.note(f"{self._process} failed to start: {error}")
            self._process.kill()
        finished = RayTaskError(name or "__init__", str(error), error).as_instanceof_cause() if error else None
        if name is not None:
            cluster.at(f"answer {cluster.role_of(self._process)}.{moment}", self._process)
        self._open.pop(ref, None)
        delay_s = cluster.latency(self._process)
        cluster.kernel.call_later(delay_s, lambda: ref.finish(value, finished))
        self._running[group] -= 1
        for each in self._queues if name is None else (group,):
            self._pump(each)


class _Method:
    """``handle.method``."""

    def __init__(self, handle: Handle, name: str) -> None:
        self.handle, self.name = handle, name

    def options(self, **_: Any) -> _Method:
        return self

    def remote(self, *arguments: Any, **keywords: Any) -> Ref:
        handle, cluster = self.handle, self.handle._cluster
        kernel, name = cluster.kernel, self.name
        ref = Ref(handle._process, name, handle._actor_id)
        if handle._failed is not None:
            kernel.call_later(0.001, lambda: ref.finish(error=handle._failed))
            return ref
        group = handle._group_of.get(name)
        if group is None:
            method = getattr(handle._cls, name, None)
            group = handle._group_of[name] = getattr(method, "__ray_concurrency_group__", None) or ""
        call = (name, travel(arguments), travel(keywords), ref)
        handle._open[ref] = None
        caller = kernel.current_process
        arrival_s = max(kernel.now_s + cluster.latency(handle._process), handle._arrival_s.get(caller, 0.0) + 1e-6)
        handle._arrival_s[caller] = arrival_s

        def arrive() -> None:
            if handle._process.is_alive:
                handle._queues[group].append(call)
                handle._pump(group)

        kernel.call_later(arrival_s - kernel.now_s, arrive)
        return ref


class RemoteClass:
    """``ray.remote(Class)``."""

    def __init__(self, cluster: Callable[[], Cluster], cls: type, groups: dict[str, int] | None = None) -> None:
        self._cluster, self._cls, self._groups = cluster, cls, groups or {}

    def options(self, **_: Any) -> RemoteClass:
        return self

    def remote(self, *arguments: Any, **keywords: Any) -> Handle:
        cluster = self._cluster()
        return cluster.start_actor(self._cls, self._groups, arguments, keywords)


class Cluster:
    """Ray's part of a schedule."""

    def __init__(self, kernel: Kernel, at: Callable[[str, Process], None], note: Callable[[str], None]) -> None:
        _THINGS.clear()
        self.kernel, self.at, self.note = kernel, at, note
        self.name_of_class: dict[str, Callable[[Any, Any], str]] = {}
        self.roles: dict[Process, str] = {}
        self.cut_until_s: dict[str, float] = {}
        """Role -> time until which no message reaches it."""

    def forget(self) -> None:
        for thing in _THINGS:
            vars(thing).clear()
        _THINGS.clear()

    def role_of(self, process: Process) -> str:
        """Return the role of a process, whichever incarnation it is."""
        return self.roles.get(process, process.name)

    def latency(self, process: Process) -> float:
        """Return the latency of a message to or from a process."""
        role = self.roles.get(process, process.name)
        delay_s = self.kernel.draw("message " + role, 0.0005, 0.02)
        if self.cut_until_s:
            delay_s += max(self.cut_until_s.get(role, 0.0) - self.kernel.now_s, 0.0)
        return delay_s

    def start_actor(self, cls: type, groups: dict[str, int], arguments: Any, keywords: Any) -> Handle:
        kernel = self.kernel
        namer = self.name_of_class.get(cls.__name__)
        role = namer(arguments, keywords) if namer else cls.__name__
        count = sum(r == role for r in self.roles.values())
        process = Process(kernel, role if not count else f"{role}#{count + 1}", owner=kernel.current_process)
        self.roles[process] = role
        handle = Handle(self, process, cls, groups)
        process.on_death[handle._died] = None
        call = (None, travel(arguments), travel(keywords), Ref(process, "__init__"))

        def start() -> None:
            if process.is_alive:
                handle._queues[""].appendleft(call)
                handle._pump("")

        kernel.call_later(kernel.draw(f"start {role}", 0.5, 5.0), start)
        return handle

    # The functions of the module

    def wait(self, refs: Sequence[Ref], *, num_returns: int = 1, timeout: float | None = None, **_: Any) -> Any:
        refs, kernel = list(refs), self.kernel
        end_s = None if timeout is None else kernel.now_s + timeout
        me = kernel.current
        while True:
            done = [ref for ref in refs if ref.is_done]
            left_s = None if end_s is None else end_s - kernel.now_s
            if len(done) >= num_returns or (left_s is not None and left_s <= 0):
                done = done[:num_returns]
                return done, [ref for ref in refs if ref not in done] if done else refs
            open_refs = [ref for ref in refs if not ref.is_done]
            for ref in open_refs:
                ref.waiting.append(me)
            try:
                kernel.park(left_s, open_refs)
            finally:
                for ref in open_refs:
                    if me in ref.waiting:
                        ref.waiting.remove(me)

    def get(self, refs: Any, *, timeout: float | None = None) -> Any:
        if not isinstance(refs, Ref):
            return [self.get(ref, timeout=timeout) for ref in refs]
        if not refs.is_done and not self.wait([refs], timeout=timeout)[0]:
            raise GetTimeoutError(f"{refs!r} is not there after {timeout} s")
        if refs.error is not None:
            raise refs.error
        return refs.value

    def put(self, value: Any, **_: Any) -> Ref:
        ref = Ref("an object")
        ref.value, ref.is_done = value, True
        return ref

    def kill(self, handle: Handle, **_: Any) -> None:
        handle._cause = "ray.kill"
        handle._process.kill()


def patch_ray(patches: Any, cluster: Callable[[], Cluster]) -> None:
    """Redirect the functions of the module ray to the current cluster."""
    patches.set(ray, "wait", lambda refs, **options: cluster().wait(refs, **options))
    patches.set(ray, "get", lambda refs, timeout=None: cluster().get(refs, timeout=timeout))
    patches.set(ray, "put", lambda value, **_: cluster().put(value))
    patches.set(ray, "kill", lambda handle, **_: cluster().kill(handle))
    patches.set(ray, "ObjectRef", Ref)
    patches.set(ray, "is_initialized", lambda: False)
    patches.set(ray, "nodes", lambda: [])
    patches.set(ray, "cluster_resources", lambda: {"GPU": 64, "CPU": 64})

    def remote(*given: Any, **options: Any) -> Any:
        if given:
            return RemoteClass(cluster, given[0])
        return lambda cls: RemoteClass(cluster, cls, options.get("concurrency_groups"))

    patches.set(ray, "remote", remote)
