"""Show what happened to prompt groups, from the ledger that a run keeps in ``--save`` (see slime/ext/ledger).

    slime ledger runs/tiny/save/ledger                       totals
    slime ledger runs/tiny/save/ledger --group 1234          by the number of the prompt group
    slime ledger runs/tiny/save/ledger --sample 9872         by Sample.index
    slime ledger runs/tiny/save/ledger --prompt "What is 3"  by the beginning of the prompt
    slime ledger runs/tiny/save/ledger --check               nothing lost, trained twice or damaged

The ledger begins at the last checkpoint.  The run may still be writing it.  ``--check`` reads every byte, and exits
with code 1 if the invariant is broken or a file is damaged, cut short or missing.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.ledger.frames import Kind, Record, folder_bytes, read_folder, segment_files
from slime.ext.ledger.records import ReplayState, RolloutState
from slime.flags.kinds import non_negative_int
from slime.utils.errors import DataError
from tools.terminal import plain, say

MAX_GROUPS_SHOWN = 20
MAX_PROBLEMS_SHOWN = 50

FLIGHT = "in flight"
WAITING = "waiting in the buffer"
TRAINED = "trained"
HANDED = "handed over, not yet trained"
FILTERED = "dropped by the filter"
DISCARDED = "discarded"


class Balance:
    """The place of each group after all events that were not rolled back.

    issued = trained + handed over, not yet trained + filtered + discarded + waiting in the buffer + in flight

    Invariant: ``place`` holds every issued group exactly once.
    """

    def __init__(self, state: ReplayState) -> None:
        self.place: dict[int, str] = {}
        self._state = state
        self._problems: list[str] = []
        latest = max(state.rollouts, default=-1)
        for rollout_id, rollout in sorted(state.rollouts.items()):
            self._add(rollout, is_latest=rollout_id == latest)

    def _add(self, rollout: RolloutState, *, is_latest: bool) -> None:
        where = f"rollout {rollout.rollout_id}"
        for call in rollout.calls:
            for name in call.names:
                if name is None:
                    continue
                self._move(name, FLIGHT if call.wanted is not None else WAITING, where)
        for name in rollout.filtered:
            self._move(name, FILTERED, where)
        for name in rollout.discarded:
            self._move(name, DISCARDED, where)
        if rollout.batch is None:
            return
        for handed in rollout.handed:
            if handed.name is not None:
                self._move(handed.name, TRAINED if rollout.is_trained else HANDED, where)
        if not is_latest and not rollout.batch.head.get("keeps_open"):
            issued_here = {name for call in rollout.calls for name in call.names if name is not None}
            self._problems += [
                f"group {name} was issued in {where}, which ended with the group still in flight"
                for name in sorted(issued_here)
                if self.place[name] == FLIGHT
            ]

    def _move(self, name: int, place: str, where: str) -> None:
        before = self.place.get(name)
        if before in (TRAINED, HANDED, FILTERED, DISCARDED):
            self._problems.append(f"group {name} is {place} in {where} after it was {before}")
        self.place[name] = place

    def totals(self) -> dict[str, int]:
        """Return the number of groups by place, of rollouts, and of processes."""
        counts = Counter(self.place.values())
        rollouts = self._state.rollouts.values()
        return {
            "groups issued": len(self.place),
            **{f"groups {place}": counts[place] for place in (TRAINED, HANDED, FILTERED, WAITING, FLIGHT, DISCARDED)},
            "rollouts complete": sum(rollout.batch is not None for rollout in rollouts),
            "processes": self._state.num_processes,
            "checkpoints published": len(self._state.published),
        }

    def problems(self) -> list[str]:
        """Return one sentence for each damaged file, and for each group that is lost or was trained twice."""
        return [f"damaged, {self._state.damage}"] * bool(self._state.damage) + self._problems


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the ledger's folder, or the --save folder that holds it")
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--group", type=non_negative_int, help="number of a prompt group (Sample.group_index)")
    question.add_argument("--sample", type=non_negative_int, help="Sample.index of any of its samples")
    question.add_argument("--prompt", help="beginning of the prompt")
    question.add_argument("--check", action="store_true", help="check that nothing is lost, trained twice or damaged")
    options = parser.parse_args(arguments)
    folder = options.folder / "ledger" if (options.folder / "ledger").is_dir() else options.folder
    if not folder.is_dir() or not segment_files(folder):
        parser.error(f"{plain(options.folder)} holds no ledger; give the folder ledger of a --save folder.")
    records = read_folder(folder)
    if any(value is not None for value in (options.group, options.sample, options.prompt)):
        return print_groups(find(records, options))
    if options.check:
        damaged: list[str] = []
        balance = Balance(ReplayState().read(checked(records, damaged)))
        return print_check(balance, damaged)
    balance = Balance(ReplayState().read(records))
    print_totals(balance, folder)
    return 0


def checked(records: Iterator[Record], damaged: list[str]) -> Iterator[Record]:
    """Yield the records, and note those whose samples differ from what was written."""
    for record in records:
        try:
            record.read_blob()
        except DataError as error:
            damaged.append(str(error))
        yield record


def find(records: Iterator[Record], options: argparse.Namespace) -> dict[int, list[tuple[int, Record]]]:
    """Return the records of each group, each with the number of the process that wrote it."""
    wanted: set[int] = set() if options.group is None else {options.group}
    found: dict[int, list[tuple[int, Record]]] = {}
    process = 0
    for record in records:
        head = record.head
        if record.kind is Kind.LIFE:
            process += 1
        elif record.kind is Kind.ISSUED:
            for described in head["groups"]:
                if described is not None and _is_meant(described, options):
                    wanted.add(described[0])
                if described is not None and described[0] in wanted:
                    found.setdefault(described[0], []).append((process, record))
        elif record.kind is Kind.DISCARDED:
            for name in wanted & set(head["groups"]):
                found.setdefault(name, []).append((process, record))
        elif head.get("g") in wanted:
            found.setdefault(head["g"], []).append((process, record))
        elif record.kind in (Kind.BATCH, Kind.TRAINED, Kind.PUBLISHED):
            for known in found.values():
                if _concerns(record, [earlier for _, earlier in known]):
                    known.append((process, record))
    return found


def _concerns(record: Record, known: list[Record]) -> bool:
    """Return whether an event of a rollout concerns this group."""
    handed = [earlier.head["r"] for earlier in known if earlier.kind is Kind.HANDED]
    if record.kind is Kind.PUBLISHED:
        is_new = known[-1].kind is not Kind.PUBLISHED
        return is_new and bool(handed) and handed[-1] <= record.head["rollout"]
    return record.head["rollout"] in handed


def _is_meant(described: list[Any], options: argparse.Namespace) -> bool:
    _, indices, prompt, _ = described
    if options.sample is not None:
        return options.sample in indices
    return options.prompt is not None and prompt.startswith(options.prompt)


def print_groups(found: dict[int, list[tuple[int, Record]]]) -> int:
    """Print the records of each group; return the exit code."""
    if not found:
        say("The ledger has no such group.")
        return 1
    for name, records in list(found.items())[:MAX_GROUPS_SHOWN]:
        print_group(name, records)
    if len(found) > MAX_GROUPS_SHOWN:
        say(f"... and {len(found) - MAX_GROUPS_SHOWN} more groups: {sorted(found)[MAX_GROUPS_SHOWN:][:50]}")
    return 0


def print_group(name: int, records: list[tuple[int, Record]]) -> None:
    """Print the records of one group."""
    _, first = records[0]
    described = next((d for d in first.head.get("groups", []) if isinstance(d, list) and d[0] == name), None)
    if described is not None:
        say(f"group {name}, samples {described[1][0]} to {described[1][-1]}: {described[2]!r}")
    else:
        say(f"group {name}")
    seen_process = None
    for process, record in records:
        if process != seen_process:
            say(f"  process {process}")
            seen_process = process
        time = datetime.fromtimestamp(record.head["t"]).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        rollout = record.head.get("rollout", record.head["r"])
        say(f"    {time}  rollout {rollout:>4}  {describe(name, record)}")


def describe(name: int, record: Record) -> str:
    """Return the text of a record about a group."""
    head = record.head
    if record.kind is Kind.ISSUED:
        is_recovered = any(d and d[0] == name and d[3] for d in head["groups"])
        return "issued again, with what an earlier process had generated" if is_recovered else "issued"
    text = {
        Kind.RESPONSE: "answered",
        Kind.FINISHED: "finished",
        Kind.FILTERED: f"dropped by the filter: {head.get('reason')}",
        Kind.RETURNED: "back in the buffer",
        Kind.HANDED: "handed to training",
        Kind.DISCARDED: "discarded: the rollout was full, and unfinished groups are not kept",
        Kind.BATCH: "the rollout's train data is complete",
        Kind.TRAINED: "trained",
        Kind.PUBLISHED: "saved in a checkpoint",
    }[record.kind]
    samples = []
    for index, entry in zip(head.get("i") or [], head.get("entries") or [], strict=False):
        for leaf in entry["leaves"]:
            weights = ",".join(leaf["weights"]) or "-"
            reward = "" if leaf["reward"] is None else f", reward {leaf['reward']}"
            samples.append(f"{index}: {leaf['response']} tokens {leaf['status']}, weights {weights}{reward}")
    return f"{text}  [{'; '.join(samples)}]" if samples else text


def print_totals(balance: Balance, folder: Path) -> None:
    """Print counts of groups and rollouts."""
    say(f"{folder}: {folder_bytes(folder):,} bytes in {len(segment_files(folder))} files")
    for label, value in balance.totals().items():
        say(f"  {label:<28} {value:>10,}")
    for problem in balance.problems()[:MAX_PROBLEMS_SHOWN]:
        say(f"  BROKEN  {problem}")


def print_check(balance: Balance, damaged: Sequence[str] = ()) -> int:
    """Print the groups that break the invariant; return the exit code."""
    problems = [*balance.problems(), *damaged]
    for label, value in balance.totals().items():
        say(f"{label:<30} {value:>10,}")
    for problem in problems[:MAX_PROBLEMS_SHOWN]:
        say(f"BROKEN  {problem}")
    if not problems:
        say("Every issued group was trained once, was dropped for a reason, or is waiting.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
