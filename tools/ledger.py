"""What happened to a prompt?  Reads the ledger that a run keeps in ``--save`` (see slime/rollout/ledger).

    python tools/ledger.py runs/tiny/save/ledger                       totals
    python tools/ledger.py runs/tiny/save/ledger --group 1234          by the number of the prompt group
    python tools/ledger.py runs/tiny/save/ledger --sample 9872         by Sample.index
    python tools/ledger.py runs/tiny/save/ledger --prompt "What is 3"  by the beginning of the prompt
    python tools/ledger.py runs/tiny/save/ledger --check               nothing lost, nothing trained twice

It may be read while the run writes it.  ``--check`` ends with code 1 when the invariant is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.rollout.ledger.account import Account
from slime.rollout.ledger.reader import folder_bytes, read_folder, segment_files
from slime.rollout.ledger.records import Kind, Record
from slime.rollout.ledger.story import Story

MAX_GROUPS_SHOWN = 20


def main(arguments: list[str] | None = None) -> int:
    """Answer the question on the command line; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the ledger's folder, or the --save folder that holds it")
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--group", type=int, help="number of a prompt group (Sample.group_index)")
    question.add_argument("--sample", type=int, help="Sample.index of any of its samples")
    question.add_argument("--prompt", help="beginning of the prompt")
    question.add_argument("--check", action="store_true", help="check that nothing is lost and nothing trained twice")
    options = parser.parse_args(arguments)
    folder = options.folder / "ledger" if (options.folder / "ledger").is_dir() else options.folder
    if not folder.is_dir() or not segment_files(folder):
        parser.error(f"{options.folder} holds no ledger; give the folder ledger of a --save folder.")
    with progress(folder_bytes(folder)) as passed:
        records = read_folder(folder, progress=passed)
        if options.group is None and options.sample is None and options.prompt is None:
            account = Account(Story().read(records))
        else:
            found = find(records, options)
    if options.check:
        return print_check(account)
    if options.group is None and options.sample is None and options.prompt is None:
        print_totals(account, folder)
        return 0
    return print_groups(found)


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on terminals, when there is enough to read for one to be seen."""
    from tqdm import tqdm

    is_small = total < 64 << 20 or not sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=is_small) as bar:
        yield bar.update


def find(records: Iterator[Record], options: argparse.Namespace) -> dict[int, list[tuple[int, Record]]]:
    """Group -> its records, each with the number of the process that wrote it."""
    wanted: set[int] = set() if options.group is None else {options.group}
    found: dict[int, list[tuple[int, Record]]] = {}
    life = 0
    for record in records:
        head = record.head
        if record.kind is Kind.LIFE:
            life += 1
        elif record.kind is Kind.ISSUED:
            for described in head["groups"]:
                if described is not None and _is_meant(described, options):
                    wanted.add(described[0])
                if described is not None and described[0] in wanted:
                    found.setdefault(described[0], []).append((life, record))
        elif record.kind is Kind.DISCARDED:
            for name in wanted & set(head["groups"]):
                found.setdefault(name, []).append((life, record))
        elif head.get("g") in wanted:
            found.setdefault(head["g"], []).append((life, record))
        elif record.kind in (Kind.BATCH, Kind.REPLAYED, Kind.TRAINED, Kind.PUBLISHED):
            for known in found.values():
                if _concerns(record, [earlier for _, earlier in known]):
                    known.append((life, record))
    return found


def _concerns(record: Record, known: list[Record]) -> bool:
    """Whether something that happened to a rollout happened to this group."""
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
    """The story of each group, line by line."""
    if not found:
        print("The ledger has no such group.")
        return 1
    for name, records in list(found.items())[:MAX_GROUPS_SHOWN]:
        print_group(name, records)
    if len(found) > MAX_GROUPS_SHOWN:
        print(f"... and {len(found) - MAX_GROUPS_SHOWN} more groups: {sorted(found)[MAX_GROUPS_SHOWN:][:50]}")
    return 0


def print_group(name: int, records: list[tuple[int, Record]]) -> None:
    """One group."""
    _, first = records[0]
    described = next((d for d in first.head.get("groups", []) if isinstance(d, list) and d[0] == name), None)
    if described is not None:
        print(f"group {name}, samples {described[1][0]} to {described[1][-1]}: {described[2]!r}")
    else:
        print(f"group {name}")
    seen_life = None
    for life, record in records:
        if life != seen_life:
            print(f"  process {life}")
            seen_life = life
        time = datetime.fromtimestamp(record.head["t"]).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        rollout = record.head.get("rollout", record.head["r"])
        print(f"    {time}  rollout {rollout:>4}  {describe(name, record)}")


def describe(name: int, record: Record) -> str:
    """What a record says of a group."""
    head = record.head
    if record.kind is Kind.ISSUED:
        is_recovered = any(d and d[0] == name and d[3] for d in head["groups"])
        return "issued, as far as an earlier process had brought it" if is_recovered else "issued"
    text = {
        Kind.RESPONSE: "answered",
        Kind.FINISHED: "finished",
        Kind.FILTERED: f"dropped by the filter: {head.get('reason')}",
        Kind.RETURNED: "back in the buffer",
        Kind.HANDED: "handed to training",
        Kind.DISCARDED: "discarded: the rollout was full, and nothing was to be kept",
        Kind.BATCH: "the rollout's train data is complete",
        Kind.REPLAYED: "the rollout's train data was taken from the ledger",
        Kind.TRAINED: "trained",
        Kind.PUBLISHED: "a checkpoint holds it",
    }[record.kind]
    samples = []
    for index, entry in zip(head.get("i") or [], head.get("entries") or [], strict=False):
        for leaf in entry["leaves"]:
            weights = ",".join(leaf["weights"]) or "-"
            reward = "" if leaf["reward"] is None else f", reward {leaf['reward']}"
            samples.append(f"{index}: {leaf['response']} tokens {leaf['status']}, weights {weights}{reward}")
    return f"{text}  [{'; '.join(samples)}]" if samples else text


def print_totals(account: Account, folder: Path) -> None:
    """Counts of groups and rollouts."""
    print(f"{folder}: {folder_bytes(folder):,} bytes in {len(segment_files(folder))} files")
    for label, value in account.totals().items():
        print(f"  {label:<28} {value:>10,}")


def print_check(account: Account) -> int:
    """The invariant, and where it is broken."""
    problems = account.problems()
    for label, value in account.totals().items():
        print(f"{label:<30} {value:>10,}")
    for problem in problems[:50]:
        print(f"BROKEN  {problem}")
    if not problems:
        print("Every issued group was trained once, dropped for a reason, or waits.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
