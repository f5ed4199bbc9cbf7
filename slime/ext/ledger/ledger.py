"""The rollout manager's ledger: an observer of the run's groups that also records calls of the data source.

    ledger = Ledger(args, data_source)
    ledger.start(first_rollout)                     once the data source is at the checkpoint's position
    ledger.make_samples(k, generate)                returns the recorded samples of rollout k, or generate()
    ledger.trained(k); ledger.save(k, position); ledger.published(k)

A checkpoint's position is the first segment that a process resuming from it must read.
"""

from __future__ import annotations

import logging
import uuid
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from slime.ext.ledger.flags import ledger_folder
from slime.ext.ledger.frames import Kind, read_folder, segment_number
from slime.ext.ledger.journal import Issued, Journal, config_fingerprint, user_code
from slime.ext.ledger.records import SAMPLE_FLAGS
from slime.ext.ledger.recovery import Marks, Recovery, SourceRecorder
from slime.ext.ledger.segments import retire
from slime.rollout.base_types import Entry, Group, RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSource, groups_from_state, groups_to_state
from slime.rollout.plain_values import read_state, write_state
from slime.rollout.run_state import GroupObserver
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"


def position_path(folder: str, rollout_id: int) -> Path:
    """Return the file with a checkpoint's position in the ledger, stored next to the data position."""
    return Path(folder) / "rollout" / f"ledger_position_{rollout_id}.pt"


class Position(NamedTuple):
    """A position in the ledger."""

    first: int
    """The oldest segment still needed."""
    issued: list[Issued]
    """Groups issued to the rollout function and still open."""
    others: list[Any]
    """States of groups left open by an earlier process and not yet requested by the rollout function."""


class Ledger(GroupObserver):
    """The ledger of one process.

    Threads: ``make_samples`` and ``position`` are never called concurrently.  Other methods may be called while
    ``make_samples`` runs, so they must not touch ``_recovery``.
    """

    def __init__(self, args: Namespace, source: Any, *, is_threaded: bool = True) -> None:
        """Open the ledger for a new process.

        Args:
            args: the run's arguments.
            source: the data source, whose calls are recorded from now on.
            is_threaded: see ``JournalWriter``.
        """
        self._args = args
        self._folder = folder = ledger_folder(args.rollout_ledger_dir, args.save)
        self._fingerprint = config_fingerprint(args)
        if isinstance(source, RolloutDataSource):
            self._fingerprint[SAMPLE_FLAGS]["content of prompt_data"] = source.content_digest()
        self._run = _run_of(folder) or uuid.uuid4().hex
        """Id of the run, by which checkpoints recognize the ledger even if the folder was moved."""
        self.journal = Journal(
            folder,
            fingerprint=self._fingerprint,
            run=self._run,
            user_code=user_code(args),
            flush_s=args.rollout_ledger_flush_s,
            timeout_s=args.rollout_ledger_timeout_s,
            is_threaded=is_threaded,
        )
        self.source_recorder = SourceRecorder(source, self.journal, self._recover)
        self._recovery: Recovery | None = None
        self._marks = Marks({}, {})
        self._saved: dict[int, int] = {}
        """Rollout of a checkpoint not known to be published -> the first segment that it needs."""
        self._is_started = False

    def start(self, start_rollout_id: int) -> None:
        """Recover the records made after the checkpoint that this process starts from."""
        self._is_started = True
        first, open_groups = self._find_position(start_rollout_id)
        if first < self.journal.writer.number or open_groups:
            self._recovery = Recovery(
                self._folder,
                first_segment=first,
                start_rollout_id=start_rollout_id,
                fingerprint=self._fingerprint,
                open_groups=open_groups,
            )
            if found := self._recovery.describe():
                logger.info(
                    "Reusing %s from the ledger %s. Remove the folder to generate them again.",
                    found,
                    self._folder,
                )
        self.journal.record_start(start_rollout_id, first_segment=first)

    def _find_position(self, start_rollout_id: int) -> tuple[int, list[Any]]:
        """Return the first segment to read and the groups that were open when the checkpoint was made."""
        own = self.journal.writer.number
        if start_rollout_id == 0:
            return _fresh_position(self._folder, own, self._args.save), []
        if self._args.load is None:
            return own, []
        path = position_path(self._args.load, start_rollout_id - 1)
        if not path.is_file():
            logger.info("No ledger position %s: records after the checkpoint are not used.", path)
            return own, []
        position = read_state(path, what="The position in the ledger")
        open_groups = groups_from_state(position["open"])
        if position["run"] != self._run or position["first"] >= own:  # the folder may have been moved since
            logger.warning(
                "The ledger %s is not the checkpoint's, which was %s: records after the checkpoint are not used, and "
                "its %d groups in flight are generated again.",
                self._folder,
                position["folder"],
                len(open_groups),
            )
            return own, open_groups
        return position["first"], open_groups

    def _recover(self, group: list[Any]) -> list[Any] | None:
        if self._recovery is None:
            return None
        return self._recovery.recover(group, self.journal.rollout_id, self._marks)

    def make_samples(self, rollout_id: int, generate: Callable[[], RolloutFnTrainOutput]) -> RolloutFnTrainOutput:
        """Return a rollout's train data: as recorded before a crash, or from ``generate``, and then record it."""
        if not self._is_started:
            self.start(rollout_id)
        if self._recovery is not None:
            output = self._recovery.replay(rollout_id, self.source_recorder)
            if self._recovery.is_used_up:
                self._recovery = None
            if output is not None:
                logger.info("Rollout %d: %d groups from the ledger", rollout_id, len(output.samples))
                return output
        self.journal.record_begin(rollout_id)
        self._marks.masked.clear()
        output = generate()
        # Whether the rollout function keeps groups in flight across rollouts.
        keeps_open = bool(getattr(load_function(self._args.rollout_function_path), "keeps_groups_in_flight", False))
        self.journal.record_batch(rollout_id, output.samples, output.metrics, keeps_open=keeps_open)
        return output

    def position(self, rollout_id: int) -> Position:
        """Return the position before rollout ``rollout_id`` begins, for a checkpoint made now."""
        if not self._is_started:
            self.start(rollout_id)
        open_groups = list(self.journal.open.values())
        others = self.source_recorder.ahead
        first = min((issued.segment for issued in open_groups), default=self.journal.writer.rotate())
        if self._recovery is not None:
            first = min(first, self._recovery.first_segment)
            others += self._recovery.given
        return Position(first, open_groups, groups_to_state(others))

    def answered(self, sample: Sample, entry: Entry) -> None:
        self.journal.record_response(sample, entry)

    def finished(self, group: Group) -> None:
        self.journal.record_finished(group)

    def dropped(self, group: Group, reason: str | None) -> None:
        self.journal.record_filtered(group, reason)

    def has_mask(self, sample: Sample) -> bool:
        """Return whether the sample was recovered in the rollout that generated it."""
        return self._marks.masked.pop(id(sample), None) is not None

    def lacks_hooks(self, sample: Sample) -> bool:
        """Return whether the answer was recorded before sample hooks ran on it."""
        return self._marks.unseen.pop(id(sample), None) is not None

    def trained(self, rollout_id: int) -> None:
        self.journal.record_trained(rollout_id)

    def save(self, rollout_id: int, position: Position | None = None) -> None:
        """Write the position of the checkpoint after ``rollout_id``.

        Args:
            position: the position before the next rollout began; None if it has not begun.
        """
        first, open_groups, others = self.position(rollout_id + 1) if position is None else position
        self.journal.writer.flush(sync=True)
        path = position_path(self._args.save, rollout_id)
        groups = groups_to_state([[Sample.from_dict(fields) for fields in issued.fields] for issued in open_groups])
        folder = str(self._folder.resolve())
        content = {"run": self._run, "folder": folder, "first": first, "open": groups + others}
        write_state(path, content, what="The position in the ledger")
        self._saved[rollout_id] = first

    def published(self, rollout_id: int) -> None:
        """Record that the checkpoint is published, and drop what only earlier checkpoints needed.

        With --async-save it is published later, once on disk; then the next call handles it.
        """
        latest = max((k for k in self._saved if k <= _tracked_rollout(self._args.save)), default=None)
        if latest is None:
            return
        first = self._saved[latest]
        for done in [k for k in self._saved if k <= latest]:
            del self._saved[done]
        self.journal.record_published(latest, first)
        try:
            freed = retire(self._folder, first_needed=first)
        except OSError as error:  # the next checkpoint tries again
            logger.warning("Could not delete obsolete files of the ledger %s: %s", self._folder, error)
            return
        logger.debug("The ledger freed %d bytes that the checkpoint after rollout %d made obsolete", freed, latest)

    def close(self) -> None:
        self.journal.close()


def _run_of(folder: Path) -> str | None:
    """Return the id of the run whose ledger this is, or None."""
    return next((record.head["run"] for record in read_folder(folder) if record.head.get("run")), None)


def _fresh_position(folder: Path, own: int, save: str) -> int:
    """Return the first segment to read if no checkpoint is loaded.

    Processes that began at rollout 0 and died before their first checkpoint are recovered.  Once a checkpoint has been
    published, a start at rollout 0 is a new run.
    """
    if _tracked_rollout(save) >= 0:
        return own
    first = own
    for record in read_folder(folder):
        if record.kind is Kind.DAMAGED and first == own:
            logger.error("The ledger %s is damaged, %s. It is not used.", folder, record.head["what"])
        elif record.kind is Kind.LIFE:
            first = min(first, segment_number(record.segment)) if record.head["start"] == 0 else own
    return first


def _tracked_rollout(folder: str) -> int:
    """Return the rollout of the checkpoint that the tracker file names; -1 if none."""
    tracker = Path(folder) / TRACKER
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdigit() else -1
