"""The write-ahead ledger of one process: one cheap method for each thing that can happen to a prompt group.

The methods of the rollout path hold references and return; the frames are made by the writer's thread.  What the
ledger is read for is in ``replay`` (recovery) and ``tools/ledger.py``.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slime.rollout.ledger.packing import EntryEncoder, try_pickle
from slime.rollout.ledger.records import Kind, pack_frame
from slime.rollout.ledger.snapshots import Leaves, snapshot
from slime.rollout.ledger.writer import SEGMENT_BYTES, LedgerWriter
from slime.utils.types import Sample

PROMPT_CHARS = 160
"""Characters of a prompt that the head of ISSUED shows."""


class Issued(NamedTuple):
    """A group in the hands of the rollout function."""

    indices: list[int]
    """``Sample.index`` of each execution; with the group's number, the name of the execution."""
    fields: list[dict[str, Any]]
    """The fields of each sample when it was issued."""
    segment: int
    """The oldest segment that may hold a record of it."""


class _Item(NamedTuple):
    """Something that happened, on its way to the writer."""

    kind: Kind
    head: dict[str, Any]
    entries: Sequence[tuple[Any, Leaves, dict[str, Any] | None]] = ()
    """``(key, samples, fields as issued)`` of each execution in the record."""
    forget: Sequence[Any] | None = ()
    """Executions whose next record must not build on earlier ones; None: all of them."""
    blob: bytes = b""


class Ledger:
    """Everything that a process writes down.

    Invariant: what ``issued`` named is open until it is returned, filtered, handed over or discarded.
    """

    def __init__(
        self,
        folder: Path,
        *,
        facts: Mapping[str, Any],
        has_user_code: bool = True,
        has_late_user_code: bool = True,
        has_sample_hooks: bool = True,
        flush_s: float = 0.02,
        timeout_s: float = 60.0,
        segment_bytes: int = SEGMENT_BYTES,
        is_threaded: bool = True,
    ) -> None:
        """Open ``folder`` for a new process.

        Args:
            facts: the flags that decide what a group is; recovery compares them.
            has_user_code: whether lists of a sample may be edited in place between two records.
            has_late_user_code: whether they may be once the group is finished.
            has_sample_hooks: whether they may be edited while an answer waits to be written.
            flush_s, timeout_s, segment_bytes, is_threaded: see ``LedgerWriter``.
        """
        self.rollout_id = -1
        self.open: dict[int, Issued] = {}
        self._facts = dict(facts)
        self._looks_again = has_user_code
        self._copy_lists = has_sample_hooks
        self._is_settled = {Kind.HANDED: not has_late_user_code}
        self._encoder = EntryEncoder(trust_identity=not has_user_code)
        self.writer = LedgerWriter(
            folder,
            self._frame,
            flush_s=flush_s,
            timeout_s=timeout_s,
            segment_bytes=segment_bytes,
            is_threaded=is_threaded,
        )

    # The process

    def live(self, start_rollout_id: int, *, first_segment: int) -> None:
        """This process begins with ``start_rollout_id`` and knows what the segments from ``first_segment`` on say."""
        self._note(Kind.LIFE, start=start_rollout_id, first=first_segment, facts=self._facts)
        self.writer.flush()

    def close(self) -> None:
        """Write what is still in memory."""
        self.writer.close()

    # The rollout path

    def issued(self, num_wanted: int, groups: list[list[Sample]], recovered: Iterable[bool]) -> None:
        """The data source was asked for ``num_wanted`` groups and gave ``groups``.

        Args:
            recovered: for each group, whether what an earlier process noted of it was put in.
        """
        described: list[list[Any] | None] = []
        for group, is_recovered in zip(groups, recovered, strict=True):
            name = group_name(group)
            if name is None or name in self.open:
                described.append(None)
                continue
            samples = [snapshot(entry).samples[0] for entry in group]
            fields = [sample.values for sample in samples]
            issued = Issued([values["index"] for values in fields], fields, self.writer.number)
            self.open[name] = issued
            described.append([name, issued.indices, prompt_start(samples[0].values["prompt"]), is_recovered])
        self._note(Kind.ISSUED, wanted=num_wanted, groups=described)

    def response(self, sample: Sample, entry: Any) -> None:
        """The generate function made ``entry`` of ``sample``; sample hooks and reward are still to come."""
        issued = self.open.get(sample.group_index)  # type: ignore[arg-type]
        if issued is None or sample.index not in issued.indices:
            return
        key = (sample.group_index, sample.index)
        fields = issued.fields[issued.indices.index(sample.index)]
        head = {"t": time.time(), "r": self.rollout_id, "g": sample.group_index, "i": [sample.index]}
        # The hooks come right after this; the other records are taken when they have been there.
        leaves = snapshot(entry, copy_lists=self._copy_lists, pack_now=True)
        self.writer.put(_Item(Kind.RESPONSE, head, [(key, leaves, fields)]))

    def finished(self, group: list[Any]) -> None:
        """Every execution of the group is answered and rewarded."""
        self._note_group(Kind.FINISHED, group)

    def filtered(self, group: list[Any], reason: str | None) -> None:
        """The dynamic filter dropped the group."""
        name = group_name(group)
        issued = self.open.pop(name, None) if name is not None else None
        if issued is not None:
            keys = [(name, index) for index in issued.indices]
            self._note(Kind.FILTERED, forget=keys, g=name, reason=str(reason))

    def returned(self, groups: list[list[Any]]) -> None:
        """The data source takes groups back."""
        for group in groups:
            self._note_group(Kind.RETURNED, group)
            self._close_group(group)

    # The rollout manager

    def begin(self, rollout_id: int) -> int:
        """A rollout is about to be generated; gives the segment that its records begin in."""
        number = self.writer.rotate()
        self.rollout_id = rollout_id
        self._note(Kind.BEGIN, forget=None)  # A recovery that begins here must not need what was written before.
        return number

    def handed(
        self, rollout_id: int, groups: list[Any], metrics: Mapping[str, Any] | None, *, keeps_open: bool
    ) -> None:
        """``groups`` are the train data of the rollout; returns when that is written.

        Args:
            keeps_open: whether the rollout function goes on with the other open groups in its next rollout;
                otherwise it has dropped them.
        """
        seen: set[int | None] = set()
        for group in groups:
            is_flat = isinstance(group, Sample)
            name = group_name([group] if is_flat else group)
            self._note_group(Kind.HANDED, [group] if is_flat else group, is_known=name not in seen, flat=is_flat)
            seen.add(name)
        for name in seen - {None}:
            self.open.pop(name, None)  # type: ignore[arg-type]
        if not keeps_open:
            if self.open:
                self._note(Kind.DISCARDED, groups=sorted(self.open))
            self.open.clear()
        blob = try_pickle(dict(metrics or {})) or pickle.dumps({})
        self._note(Kind.BATCH, blob=blob, rollout=rollout_id, num_groups=len(groups), keeps_open=keeps_open)
        self.writer.flush()

    def replayed(self, rollout_id: int) -> None:
        """The rollout's train data came from the ledger."""
        self._note(Kind.REPLAYED, rollout=rollout_id)

    def trained(self, rollout_id: int) -> None:
        """The optimizer took the rollout's steps."""
        self._note(Kind.TRAINED, rollout=rollout_id)

    def saved(self, rollout_id: int, first_segment: int) -> None:
        """The checkpoint after ``rollout_id`` needs the segments from ``first_segment`` on."""
        self._note(Kind.SAVED, rollout=rollout_id, first=first_segment)
        self.writer.flush(sync=True)

    def published(self, rollout_id: int, first_segment: int) -> None:
        """The tracker names that checkpoint."""
        self._note(Kind.PUBLISHED, rollout=rollout_id, first=first_segment)

    # Making records

    def _note(self, kind: Kind, *, forget: Sequence[Any] | None = (), blob: bytes = b"", **facts: Any) -> None:
        head = {"t": time.time(), "r": self.rollout_id, **facts}
        self.writer.put(_Item(kind, head, forget=forget, blob=blob))

    def _note_group(self, kind: Kind, group: list[Any], *, is_known: bool = True, **facts: Any) -> None:
        name = group_name(group)
        issued = self.open.get(name) if name is not None and is_known else None
        if issued is not None and len(issued.indices) == len(group):
            keys: list[Any] = [(name, index) for index in issued.indices]
            bases: list[dict[str, Any] | None] = list(issued.fields)
            indices: list[int] | None = issued.indices
        else:
            keys, bases, indices = [None] * len(group), [None] * len(group), None
        pack_now = kind is Kind.FINISHED and self._looks_again
        entries = [
            (key, snapshot(entry, pack_now=pack_now), base)
            for key, entry, base in zip(keys, group, bases, strict=True)
        ]
        head = {"t": time.time(), "r": self.rollout_id, "g": name, "i": indices, **facts}
        is_last = kind in (Kind.RETURNED, Kind.HANDED) and indices is not None
        self.writer.put(_Item(kind, head, entries, forget=keys if is_last else ()))

    def _close_group(self, group: list[Any]) -> None:
        name = group_name(group)
        if name is not None:
            self.open.pop(name, None)

    def _frame(self, item: _Item) -> bytes:
        chunks: list[bytes] = [item.blob] if item.blob else []
        head = item.head
        if item.entries:
            described = []
            for key, leaves, base in item.entries:
                is_settled = self._is_settled.get(item.kind, False)
                description, data = self._encoder.encode(key, leaves, base, is_settled=is_settled)
                described.append(description)
                chunks += data
            head["entries"] = described
        if item.forget is None or item.forget:
            self._encoder.forget(item.forget)
        return pack_frame(item.kind, head, b"".join(chunks))


def group_name(group: Any) -> int | None:
    """``group_index`` of the group's first sample; None when it has none, or the data source gives no numbers."""
    entry = group
    while isinstance(entry, list):
        if not entry:
            return None
        entry = entry[0]
    name = entry.group_index
    return name if isinstance(name, int) and isinstance(entry.index, int) else None


def prompt_start(prompt: Any) -> str:
    """What ISSUED shows of a prompt: of messages, the last one."""
    if isinstance(prompt, list):
        prompt = str(prompt[-1].get("content", "")) if prompt and isinstance(prompt[-1], dict) else ""
    return str(prompt)[:PROMPT_CHARS]
