"""One schedule: a job with its faults, from the first command to the end of the last, and its invariants."""

from __future__ import annotations

import json
import traceback
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import train
import train_async
from slime.flags.checkpoint import derive_starting_point, has_finished_save, inspect_checkpoint
from slime.ray import job
from slime.ray.waiting import Sigterm, react_by
from tests.scripted_engine.script import Script, split_prompt
from tests.simulator.fake_ray import Cluster
from tests.simulator.faults import EXCUSES, Fault, Setup, are_too_many, may_cost_an_engine
from tests.simulator.files import Files
from tests.simulator.job import base_args, write_layout
from tests.simulator.kernel import Kernel, Process, StuckError
from tests.simulator.network import Server
from tests.simulator.oracles import check_checkpoint, check_end, check_journal, check_trained, watch_bounds
from tests.simulator.servers import LOG_PROB_UNIT, EngineServer
from tests.simulator.strikes import Strikes
from tests.simulator.trainer import NUM_BUCKETS

DEBUG = False
LIFE_HORIZON_S = 6 * 3600.0
"""Virtual seconds after which an unfinished job counts as hanging."""
ORPHANS_AFTER_S = 30.0
LEDGER_S = 10.0
"""Seconds in which the ledger writes its input, however slow its disk."""
NUM_PROMPTS = 64
PROMPTS = "".join(json.dumps({"prompt": f"p{k:03}", "label": "x"}) + "\n" for k in range(NUM_PROMPTS))
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class State:
    """The training history: the last rollout, on top of another state."""

    parent: int
    rollout_id: int
    samples: tuple[Any, ...]
    """(group, index, tokens) of each sample."""


@dataclass
class Outcome:
    """The result of a schedule."""

    violations: list[str]
    story: list[str]
    sites: Counter[str]
    num_lives: int = 0
    virtual_s: float = 0.0
    num_events: int = 0
    num_fired: int = 0

    recovery_sites: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Site -> how often it was passed until the first fault, and until RECOVERY_S later, if that is more."""
    replaced_sites: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The same for replacement processes."""


class World:
    """A running schedule."""

    num_buckets = NUM_BUCKETS
    bucket_seconds = 0.05

    def __init__(self, setup: Setup, faults: list[Fault], folder: Path, kernel: Kernel) -> None:
        self.setup, self.faults, self.folder, self.kernel = setup, faults, folder, kernel
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text(PROMPTS)
        if setup.judge:
            write_layout(folder / "layout.yaml", setup)
        self.story: list[str] = []
        self.violations: list[str] = []
        self.strikes = Strikes(self, faults)
        self.at = self.strikes.at
        """Pass a point; returns what a fault there makes its caller do."""
        self.peaks: Counter[str] = Counter()
        """The largest sizes of things that must not grow without bound."""
        self.cluster = Cluster(kernel, self.at, self.note)
        self.files = Files(self, folder)
        self.servers: dict[int, Server] = {}
        self.wire: dict[Any, int] = {}
        self.meetings: dict[Any, Any] = {}
        self.rendezvous: dict[int, Any] = {}
        """Port -> the weight group that meets there."""
        self.states: list[State | None] = [None]
        self._numbers: dict[State, int] = {}
        self.disk_state = 0
        self.committed: dict[str, int] = {}
        """Version -> state, over all lives: samples of the ledger keep the versions of the life that generated
        them."""
        self.served: set[int] = set()
        """States that engines were given, in any life."""
        self.answers: dict[tuple[tuple[int, ...], int], tuple[Process, float]] = {}
        """Prompt and seed -> the manager that passed the answer to the ledger, and when that must have written it."""
        self.script = Script(length=(2, 10))
        self.seconds_per_token = setup.seconds_per_token
        self.filtered: set[int] = set()
        self.next_port = 20000
        self._router_ports: dict[Process, list[int]] = {}
        self.next_pid = 1000
        self.engines: list[EngineServer] = []
        self.last_error: BaseException | None = None
        self.num_lives = 0
        self._ends_with_recovery = self._is_seen = False
        self.is_started = False
        """The engines got weights in this life."""

    def router_role(self, manager: Process, port: int) -> str:
        """Return which of a manager's routers listens there: the first model's, or the judge's."""
        ports = self._router_ports.setdefault(manager, [])
        if port not in ports:
            ports.append(port)
        return "router" if port == ports[0] else f"router{ports.index(port)}"

    def forget(self) -> None:
        """Break reference cycles, which nearly everything is in, to leave less for the collector."""
        for thing in (*self.cluster.roles, *self.engines):
            vars(thing).clear()
        self.cluster.forget()
        vars(self.kernel).clear()
        vars(self).clear()

    # The story

    def note(self, text: str) -> None:
        self.story.append(f"{self.kernel.now_s:9.3f} s  {text}")

    def violate(self, text: str) -> None:
        self.note(f"VIOLATION: {text}")
        self.violations.append(text)

    def within(self, what: str, size: int, bound: int) -> None:
        """Record the size of something that may not exceed a bound."""
        self.peaks[what] = max(self.peaks[what], size)
        if size > bound:
            self.violate(f"{size} {what}, of which there may be {bound}")

    def ended_with(self, error: BaseException) -> None:
        self.last_error = error
        if DEBUG:
            self.note("".join(traceback.format_exception(error)))

    # What servers and trainers tell

    def engine_started(self, server: EngineServer) -> None:
        """An engine starts, and takes its GPU once it has finished its imports."""

        earlier = [other for other in self.engines if other.gpu == server.gpu and other.process.is_alive]

        def take() -> None:
            for other in earlier:
                if server.process.is_alive and other.process.is_alive:
                    self.violate(f"{server.process} takes GPU {server.gpu}, which {other.process} still has")

        self.engines.append(server)
        self.kernel.call_later(3.0, take)

    def evicted(self, engine: str, reason: str) -> None:
        """A manager gives up an engine, which must have had a fault."""
        if not any(may_cost_an_engine(fault, self.setup) for fault in self.strikes.in_life):
            self.violate(f"{engine} is replaced ({reason}) though only {self.strikes.in_life} happened")

    def tokens_drawn(self, server: EngineServer, state: int | None, version: str, request: Any, count: int) -> None:
        if version not in self.committed:
            self.violate(f"{server.process} answers with version {version!r}, which was never committed")
        elif self.committed[version] != state:
            self.violate(
                f"{server.process} answers as version {version} with weights {state}; version {version} is "
                f"{self.committed[version]}"
            )

    def recorded(self, manager: Process, group: list[Any], *, is_written: bool = False) -> None:
        """A manager passes an answered group to the ledger, which writes it at once or within some time."""
        written_s = self.kernel.now_s + (0.0 if is_written else LEDGER_S)
        for sample in group if self.setup.is_exact else ():
            prompt, _ = split_prompt(sample.tokens)
            key = tuple(prompt), self.seed_of(sample.index)
            before, before_s = self.answers.get(key, (None, 0.0))
            if before is not manager or written_s < before_s:
                self.answers[key] = manager, written_s

    def asked(self, server: EngineServer, request: Any) -> None:
        """An engine begins an answer, which an earlier manager's ledger must not have."""
        manager, written_s = self.answers.get((tuple(request.prompt), request.seed), (None, 0.0))
        if manager is None or manager.end_s is None or request.earlier:
            return
        had_time = manager.end_s > written_s and manager.frozen_until_s <= written_s
        if had_time and not self.strikes.hit_the_disk:
            self.violate(
                f"{server.process} draws the answer to {request.prompt} with seed {request.seed} again, which "
                f"the ledger of {manager} had {manager.end_s - written_s:.1f} s before its end"
            )

    def version_committed(self, server: EngineServer, version: str, state: int | None) -> None:
        if state is None:
            self.violate(f"{server.process} commits version {version} without all buckets")
            return
        self.is_started = True
        self.served.add(state)
        if self.committed.setdefault(version, state) != state:
            self.violate(f"version {version} is of weights {self.committed[version]} and of weights {state}")

    def digest(self, state: int, index: int) -> int:
        return ((state + 1) * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03) & MASK

    def samples_of(self, batch: Any) -> list[Any]:
        logs = batch.rollout_log_probs if hasattr(batch, "rollout_log_probs") else batch["rollout_log_probs"]
        get = (lambda name: getattr(batch, name)) if hasattr(batch, "tokens") else batch.__getitem__
        rows = zip(get("sample_indices"), get("tokens"), logs, strict=True)
        return [
            (int(i), tuple(map(int, t)), tuple(round(-float(p) / LOG_PROB_UNIT) - 1 for p in row))
            for i, t, row in rows
        ]

    def trained(self, parent: int, rollout_id: int, samples: list[Any], *, is_main: bool) -> int:
        key = tuple(sorted((index, tokens) for index, tokens, _ in samples))
        state = State(parent, rollout_id, key)
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self.states)
            self.states.append(state)
        if is_main:
            self.note(f"trained on rollout {rollout_id}: weights {parent} become {number}")
            check_trained(self, parent, rollout_id, samples)
        return number

    def seed_of(self, index: int) -> int:
        return 42 + index % self.setup.samples_per_prompt

    # Lives

    def run(self, *, ends_with_recovery: bool = False) -> Outcome:
        """Run the command repeatedly until it ends well, or just to the end of the first fault's recovery."""
        self._ends_with_recovery, is_done = ends_with_recovery, False
        while not is_done and not self.violations and not self._is_seen:
            self.num_lives += 1
            if self.num_lives > 2 * len(self.faults) + 12:
                self.violate(f"the command failed {self.num_lives - 1} times with {len(self.faults)} faults")
                break
            is_done = self._live()
        if is_done and not self.violations and not self._is_seen:
            check_end(self)
        return Outcome(
            self.violations, self.story, self.strikes.sites, self.num_lives, self.kernel.now_s,
            self.kernel.num_events, len(self.strikes.fired), self.strikes.recovery_sites, self.strikes.replaced_sites,
        )  # fmt: skip

    def recovery_is_over(self) -> None:
        """Nothing more needs to be observed."""
        if self._ends_with_recovery:
            self._is_seen = True
            self.kernel.stop()

    def _live(self) -> bool:
        kernel = self.kernel
        began_s = kernel.now_s
        self.last_error, self.is_started = None, False
        self.strikes.begin_life()
        react_by(Sigterm())  # of a new driver
        kernel.horizon_s = began_s + LIFE_HORIZON_S
        driver = Process(kernel, "driver" if self.num_lives == 1 else f"driver#{self.num_lives}")
        self.cluster.roles[driver] = "driver"
        driver.on_death[kernel.stop] = None
        watch_bounds(self, driver)
        codes: list[Any] = []
        self.note(f"the command is given (time {self.num_lives})")

        def drive() -> None:
            try:
                job.run((train_async if self.setup.is_async else train).train, parse=self.make_args)
            except SystemExit as end:
                codes.append(end.code)
            driver.kill()

        kernel.spawn(driver, drive, "main")
        try:
            kernel.run()
        except StuckError as error:
            self.violate(f"a wait does not end: {error}")
            return False
        except AssertionError as error:
            self.violate("".join(traceback.format_exception(error)) if DEBUG else f"{type(error).__name__}: {error}")
            return False
        if self._is_seen:
            return False
        code = codes[0] if codes else -9
        error = self.last_error
        self.note(f"the command ended with {code}" + (f": {type(error).__name__}: {error}" if error else ""))
        is_excused = self.strikes.had_early or any(EXCUSES(fault, self.setup) for fault in self.strikes.in_life)
        is_excused |= are_too_many(self.strikes.in_life, self.make_args().max_recoveries)
        if code not in (0, -9) and not is_excused:
            self.violate(
                f"the run ended ({type(error).__name__}: {error}) though only {self.strikes.in_life} happened"
            )
        check_checkpoint(self)
        check_journal(self)
        self._pass_time(ORPHANS_AFTER_S)
        for process in kernel.processes:
            if process.is_alive:
                self.violate(f"{process} is still there {ORPHANS_AFTER_S:.0f} s after the end of its job")
        kernel.processes.clear()
        if code:  # somebody runs the command again once ongoing faults are over
            rest_s = self.strikes.last_until_s - kernel.now_s
            if rest_s > 0 and kernel.rng("patience").random() < 0.7:
                self._pass_time(rest_s)
        return code == 0

    def _pass_time(self, seconds: float) -> None:
        kernel = self.kernel
        kernel.call_later(seconds, kernel.stop)
        kernel.run()

    def make_args(self) -> Namespace:
        """Return the current flags of the command."""
        args = Namespace(**vars(base_args(self.setup)))
        save = str(self.folder / "save")
        args.save = args.load = save
        args.prompt_data = str(self.prompts)
        if self.setup.judge:
            args.sglang_config, args.prefill_num_servers = str(self.folder / "layout.yaml"), None
        if self.setup.disk:
            args.update_weight_disk_dir = str(self.folder / "weights")
        derive_starting_point(args)
        if has_finished_save(args.load):
            inspect_checkpoint(args.load, "--load")
        return args
