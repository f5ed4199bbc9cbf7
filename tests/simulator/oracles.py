"""Invariants at the end of each life of a job and at the job's end, and bounds on everything that grows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.ext.ledger.ledger import position_path
from slime.flags.checkpoint import TRACKER
from slime.rollout.base_types import first_index
from slime.rollout.data_source import groups_from_state
from slime.rollout.plain_values import read_state
from tests.scripted_engine.script import split_prompt
from tests.simulator.faults import Setup
from tests.simulator.job import is_dull
from tests.simulator.kernel import Process

if TYPE_CHECKING:
    from tests.simulator.world import State, World

LOOK_EVERY_S = 5.0
MAX_THREADS = 16
"""Bound of one process; twice what any needs."""
MAX_LEDGER_BYTES, MAX_LEDGER_FILES = 60_000, 32
"""Three rollouts and their records need a third of that."""


def groups_at_a_time(setup: Setup) -> int:
    """Return the number of groups that a rollout draws at once, which is also the number drawn ahead."""
    return 2 * (setup.batch + setup.over_sampling)


def watch_bounds(world: World, driver: Process) -> None:
    """Check regularly, while the driver lives, that nothing grows without bound."""
    kernel, setup = world.kernel, world.setup
    requests = 2 * groups_at_a_time(setup) * setup.samples_per_prompt + 1  # and a probe

    def look() -> None:
        if not driver.is_alive:
            return
        threads = Counter(strand.process for strand in kernel.strands if strand.process.is_alive and not strand.dead)
        for process, count in threads.items():
            world.within(f"threads of {world.cluster.role_of(process).rstrip('0123456789')}", count, MAX_THREADS)
        for server in world.engines:
            if server.process.is_alive:
                world.within("requests of an engine", server.num_awaited, requests)
        kernel.call_later(LOOK_EVERY_S, look)

    look()


def check_journal(world: World) -> None:
    """The ledger holds only what came after the checkpoint, not the whole run."""
    folder = world.folder / "save" / "ledger"
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    world.within("bytes of the ledger", sum(path.stat().st_size for path in files), MAX_LEDGER_BYTES)
    world.within("files of the ledger", len(files), MAX_LEDGER_FILES)


def check_checkpoint(world: World) -> None:
    """The valid checkpoint is complete, at every end of a life."""
    root = world.folder / "save"
    if not (root / TRACKER).exists():
        return
    iteration = -1
    try:
        iteration = int((root / TRACKER).read_text())
        folder = root / f"iter_{iteration:07d}"
        for rank in range(world.setup.trainer_ranks):
            json.loads((folder / f"__{rank}_0.distcp").read_bytes())
        if not (folder / "metadata.json").exists():
            raise FileNotFoundError("metadata.json")
        read_state(root / "rollout" / f"global_dataset_state_dict_{iteration}.pt", what="position")
        read_state(position_path(str(root), iteration), what="ledger position")
    except Exception as error:  # noqa: BLE001 - whatever it is, the checkpoint is of no use
        world.violate(f"the checkpoint of rollout {iteration} cannot be loaded: {type(error).__name__}: {error}")


class Checkpoints:
    """The valid checkpoint is complete at all times: nothing in it is touched, and whatever becomes valid is
    complete."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._root = f"{world.folder}/save/"
        self._tracker = self._root + TRACKER
        self._counts: str | None = None
        """The folder of the valid one, empty if there is none; None if it must be looked up."""

    def check(self, what: str, path: str) -> None:
        """Check a file operation that begins, or, for "replaced", has ended."""
        if path.startswith(self._tracker):
            self._counts = None
            if what == "replaced" and path == self._tracker:
                check_checkpoint(self._world)
        elif what in ("make", "write", "replace", "remove") and path.startswith(self._root):
            if self._counts is None:
                self._counts = self._look_up()
            if self._counts and (path == self._counts or path.startswith(self._counts + "/")):
                self._world.violate(f"the checkpoint that counts is written over: {what} {path[len(self._root) :]}")

    def _look_up(self) -> str:
        tracker = Path(self._tracker)
        return f"{self._root}iter_{int(tracker.read_text()):07d}" if tracker.exists() else ""


@dataclass
class _Asked:
    prompt: tuple[int, ...]
    seed: int


def check_trained(world: World, parent: int, rollout_id: int, samples: list[Any]) -> None:
    """The trainer trains in order, on samples generated with weights that the engines may have had."""
    before = world.states[parent]
    if (before.rollout_id if before else -1) != rollout_id - 1:
        world.violate(f"rollout {rollout_id} is trained on weights of rollout {before and before.rollout_id}")
    for index, tokens, drawn_by in samples:
        if not set(drawn_by) <= world.served:
            world.violate(f"sample {index} has tokens of weights {set(drawn_by) - world.served}, never committed")
        if world.setup.is_strict and set(drawn_by) != {parent}:
            world.violate(
                f"rollout {rollout_id}: sample {index} was drawn with weights {sorted(set(drawn_by))}, and is trained "
                f"on {parent}"
            )
        prompt, length = split_prompt(tokens)
        if length != len(drawn_by):
            world.violate(f"sample {index} has {length} response tokens and {len(drawn_by)} log-probs")
        base = world.script.tokens_of(_Asked(prompt, world.seed_of(index)), 0, length)  # type: ignore[arg-type]
        if list(tokens[len(prompt) :]) != base:
            world.violate(f"sample {index} has tokens that no engine drew for it")


def check_end(world: World) -> None:
    """Every rollout was trained once, in order, no sample twice, and no prompt is lost."""
    setup, root = world.setup, world.folder / "save"
    last = setup.num_rollout - 1
    counts = (root / TRACKER).read_text() if (root / TRACKER).exists() else "none"
    if counts != str(last):
        world.violate(f"the last checkpoint is of rollout {counts}, not of {last}")
        return
    number = json.loads((root / f"iter_{last:07d}" / "__0_0.distcp").read_bytes())["state"]
    chain: list[State] = []
    while (state := world.states[number]) is not None:
        chain.append(state)
        number = state.parent
    chain.reverse()
    if [state.rollout_id for state in chain] != list(range(setup.num_rollout)):
        world.violate(f"trained were the rollouts {[state.rollout_id for state in chain]}")
    indices = Counter(index for state in chain for index, _ in state.samples)
    if twice := [index for index, count in indices.items() if count > 1]:
        world.violate(f"samples {twice[:8]} were trained twice")
    groups = {index // setup.samples_per_prompt for index in indices}
    if len(indices) != len(groups) * setup.samples_per_prompt or len(groups) != setup.num_rollout * setup.batch:
        world.violate(f"{len(indices)} samples of {len(groups)} groups were trained")
    if setup.is_exact and groups != set(range(setup.num_rollout * setup.batch)):
        world.violate(f"trained were the groups {sorted(groups)}")
    position = read_state(root / "rollout" / f"global_dataset_state_dict_{last}.pt", what="position")
    ledger = read_state(position_path(str(root), last), what="ledger position")
    versions = world.folder / "weights"
    world.within("folders of weights", len(list(versions.iterdir())) if versions.is_dir() else 0, 2)
    world.within("groups in the buffer", len(position.get("buffer") or []), groups_at_a_time(setup))
    world.within("groups open in the ledger", len(ledger["open"]), 2 * groups_at_a_time(setup))
    held = {first_index(g) for g in groups_from_state(position.get("buffer") or []) if g}
    held |= {first_index(g) for g in groups_from_state(ledger["open"]) if g}
    held_groups = {index // setup.samples_per_prompt for index in held}
    if both := held_groups & groups:
        world.violate(f"groups {sorted(both)[:8]} were trained and are to be drawn again")
    if not setup.discards:
        issued = set(range(position["sample_group_index"]))
        lost = {g for g in issued - groups - held_groups if not is_dull(g)}
        if setup.is_filtered:
            pass
        else:
            lost = issued - groups - held_groups
        if lost:
            world.violate(f"the prompts of groups {sorted(lost)[:8]} are lost")
