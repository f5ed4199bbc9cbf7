"""The ledger as the rollout manager uses it: one object from start to end of a job, whether or not there is a ledger.

    books = open_books(args, data_source)
    books.start(first_rollout)                     once the data source stands where the checkpoint left it
    books.make_samples(k, generate)                the recorded samples of rollout k, or those of generate()
    books.trained(k); books.save(k, position); books.published(k)

Position of a checkpoint: the first segment that a process which starts from it has to read.
"""

from __future__ import annotations

import logging
import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from slime.rollout import ledger as ledger_package
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.buffer import groups_from_state, groups_to_state
from slime.rollout.ledger.compact import compact
from slime.rollout.ledger.facts import facts_of, has_late_user_code, has_sample_hooks, has_user_code
from slime.rollout.ledger.ledger import Issued, Ledger
from slime.rollout.ledger.reader import read_folder
from slime.rollout.ledger.recovery import Recovery
from slime.rollout.ledger.source import LedgeredSource
from slime.rollout.ledger.story import Story
from slime.utils.atomic_file import write_atomically
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

FOLDER = "ledger"
TRACKER = "latest_checkpointed_iteration.txt"


def ledger_folder(args: Namespace) -> Path | None:
    """Where the ledger of this run lies; None when the run keeps none."""
    is_off = getattr(args, "no_rollout_ledger", False) or not getattr(args, "save", None)
    is_debug = any(getattr(args, name, None) for name in ("debug_train_only", "debug_rollout_only"))
    if is_off or is_debug:
        return None
    return Path(getattr(args, "rollout_ledger_dir", None) or Path(args.save) / FOLDER)


def position_path(folder: str, rollout_id: int) -> Path:
    """The file, beside the data position, that says where in the ledger a checkpoint stands."""
    return Path(folder) / "rollout" / f"ledger_position_{rollout_id}.pkl"


class Position(NamedTuple):
    """Where a ledger stands."""

    first: int
    """The oldest segment that is still needed."""
    issued: list[Issued]
    """Groups in the hands of the rollout function."""
    others: list[Any]
    """States of groups that an earlier process left open and that the rollout function has not asked for yet."""


class NoBooks:
    """A run that keeps no ledger."""

    def __init__(self, source: Any) -> None:
        self.data_source = source

    def start(self, start_rollout_id: int) -> None:
        """Nothing to recover."""

    def make_samples(self, rollout_id: int, generate: Callable[[], RolloutFnTrainOutput]) -> RolloutFnTrainOutput:
        """What ``generate`` gives."""
        return generate()

    def trained(self, rollout_id: int) -> None:
        """Not noted."""

    def position(self, rollout_id: int) -> None:
        """There is none."""

    def save(self, rollout_id: int, position: None = None) -> None:
        """Not noted."""

    def published(self, rollout_id: int) -> None:
        """Not noted."""

    def close(self) -> None:
        """Nothing is open."""


class Books:
    """A run that keeps a ledger.

    Threads: ``make_samples`` and ``position`` are never called at the same time; the rest may be called while
    ``make_samples`` runs, so it must not touch ``_recovery``.
    """

    def __init__(self, args: Namespace, source: Any, folder: Path, *, is_threaded: bool = True) -> None:
        self._args = args
        self._folder = folder
        self._facts = facts_of(args)
        self.ledger = Ledger(
            folder,
            facts=self._facts,
            has_user_code=has_user_code(args),
            has_late_user_code=has_late_user_code(args),
            has_sample_hooks=has_sample_hooks(args),
            flush_s=getattr(args, "rollout_ledger_flush_s", 0.02),
            timeout_s=getattr(args, "rollout_ledger_timeout_s", 60.0),
            is_threaded=is_threaded,
        )
        self._recovery: Recovery | None = None
        self._saved: dict[int, int] = {}
        self._is_started = False
        self.data_source: Any = LedgeredSource(source, self.ledger, self._take)

    def start(self, start_rollout_id: int) -> None:
        """Take over what earlier processes noted after the checkpoint that this one starts from."""
        self._is_started = True
        first, open_groups = self._find_position(start_rollout_id)
        if first < self.ledger.writer.number:
            self._recovery = Recovery(
                self._folder,
                first_segment=first,
                start_rollout_id=start_rollout_id,
                facts=self._facts,
                open_groups=open_groups,
            )
            if found := self._recovery.describe():
                logger.info(
                    "The ledger %s gives %s; they are not generated again. Remove the folder to generate them anew.",
                    self._folder,
                    found,
                )
        self.ledger.live(start_rollout_id, first_segment=first)
        ledger_package.use(self.ledger)

    def _find_position(self, start_rollout_id: int) -> tuple[int, list[Any]]:
        """The first segment to read, and the groups that were open when the checkpoint was made."""
        own = self.ledger.writer.number
        if start_rollout_id == 0:
            return _fresh_position(self._folder, own), []
        if self._args.load is None:
            return own, []
        path = position_path(self._args.load, start_rollout_id - 1)
        if not path.is_file():
            logger.info("There is no ledger position %s: nothing that came after the checkpoint is known.", path)
            return own, []
        position = pickle.loads(path.read_bytes())
        if Path(position["folder"]).resolve() != self._folder.resolve() or position["first"] >= own:
            logger.info("The checkpoint belongs to the ledger %s, not to %s.", position["folder"], self._folder)
            return own, []
        return position["first"], groups_from_state(position["open"])

    def _take(self, group: list[Any]) -> list[Any] | None:
        return self._recovery.take(group, self.ledger.rollout_id) if self._recovery is not None else None

    def make_samples(self, rollout_id: int, generate: Callable[[], RolloutFnTrainOutput]) -> RolloutFnTrainOutput:
        """The train data of a rollout: recorded before a crash, or made by ``generate`` and recorded now."""
        if not self._is_started:
            self.start(rollout_id)
        if self._recovery is not None:
            output = self._recovery.replay(rollout_id, self.data_source)
            if self._recovery.is_used_up:
                self._recovery = None
            if output is not None:
                logger.info("Rollout %d: %d groups from the ledger", rollout_id, len(output.samples))
                self.ledger.replayed(rollout_id)
                return output
        self.ledger.begin(rollout_id)
        output = generate()
        function = getattr(self._args, "rollout_function_path", "") or ""
        self.ledger.handed(rollout_id, output.samples, output.metrics, keeps_open=_keeps_open(function))
        return output

    def position(self, rollout_id: int) -> Position:
        """Where the ledger stands before rollout ``rollout_id`` begins: a checkpoint made now needs it."""
        if not self._is_started:
            self.start(rollout_id)
        open_groups = list(self.ledger.open.values())
        others = self.data_source.ahead
        first = min((issued.segment for issued in open_groups), default=self.ledger.writer.rotate())
        if self._recovery is not None:
            first = min(first, self._recovery.first_segment)
            others += self._recovery.given
        return Position(first, open_groups, groups_to_state(others))

    def trained(self, rollout_id: int) -> None:
        """The optimizer took the rollout's steps."""
        self.ledger.trained(rollout_id)

    def save(self, rollout_id: int, position: Position | None = None) -> None:
        """Write the position that belongs to the checkpoint after ``rollout_id``.

        Args:
            position: from before the next rollout began; by default it has not begun.
        """
        first, open_groups, others = self.position(rollout_id + 1) if position is None else position
        self.ledger.saved(rollout_id, first)
        path = position_path(self._args.save, rollout_id)
        groups = groups_to_state([[Sample.from_dict(fields) for fields in issued.fields] for issued in open_groups])
        content = pickle.dumps({"folder": str(self._folder.resolve()), "first": first, "open": groups + others})
        write_atomically(path, lambda file: file.write(content), what="The position in the ledger")
        self._saved[rollout_id] = first

    def published(self, rollout_id: int) -> None:
        """The checkpoint counts: what only earlier ones needed can go.

        With --async-save it counts later, when it is on disk: then the next call finds it.
        """
        latest = max((k for k in self._saved if k <= _tracked_rollout(self._args.save)), default=None)
        if latest is None:
            return
        first = self._saved[latest]
        for done in [k for k in self._saved if k <= latest]:
            del self._saved[done]
        self.ledger.published(latest, first)
        freed = compact(self._folder, first_needed=first)
        logger.debug("The ledger dropped %d bytes that the checkpoint after rollout %d made final", freed, latest)

    def close(self) -> None:
        """Write what is in memory and stop noting."""
        ledger_package.use(None)
        self.ledger.close()


def open_books(args: Namespace, source: Any) -> Books | NoBooks:
    """The books of this run."""
    folder = ledger_folder(args)
    return NoBooks(source) if folder is None else Books(args, source, folder)


def _fresh_position(folder: Path, own: int) -> int:
    """Where to read from when no checkpoint is loaded.

    Processes that began at rollout 0 and died before their first checkpoint are taken over.  After a published
    checkpoint, a start at rollout 0 is a new run.
    """
    story = Story().read(read_folder(folder))
    first = own
    if not story.published:
        for segment, start, _ in reversed(story.starts):
            if start != 0:
                break
            first = segment
    return first


def _tracked_rollout(folder: str) -> int:
    """The rollout of the checkpoint that the tracker names; -1 when it names none."""
    tracker = Path(folder) / TRACKER
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdigit() else -1


def _keeps_open(path: str) -> bool:
    """Whether a rollout function says that groups stay in flight from one rollout to the next."""
    return bool(path) and bool(getattr(load_function(path), "keeps_groups_in_flight", False))
