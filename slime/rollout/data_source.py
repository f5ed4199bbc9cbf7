"""The source of prompt groups, the buffer of returned groups, and saving and restoring both.

A *group* is ``--n-samples-per-prompt`` copies of one data row.  The next group depends only on the seed and on the
number of groups taken so far, so the position is a handful of counters, saved with every checkpoint.
"""

from __future__ import annotations

import abc
import copy
import json
import logging
import pickle
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slime.flags.security import Trust
from slime.rollout import plain_values
from slime.rollout.plain_values import read_state, write_state
from slime.rollout.prompt_dataset import Dataset, RowDigests, changed_rows, digest_of
from slime.rollout.prompt_files import readers_of
from slime.rollout.tools import TurnsConfig, toolbox
from slime.utils.errors import ConfigError, DataError, HookError
from slime.utils.misc import load_function
from slime.utils.plugins import PluginCall, call_plugin
from slime.utils.processing_utils import load_processor, load_tokenizer, media_of
from slime.utils.types import Sample

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first", "state_path"]

logger = logging.getLogger(__name__)

OpenDataset = Callable[[Mapping[str, Any]], Dataset]
"""Opens a data set entry: a mapping with ``path`` and optionally its own ``input_key`` and ``label_key``."""


def state_path(folder: str, rollout_id: int) -> Path:
    """Return the file that holds the state after rollout ``rollout_id``."""
    return Path(folder) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


class DataSource(abc.ABC):
    """The interface of ``--data-source-path``."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next ``num_samples`` groups."""

    @abc.abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back; ``get_samples`` returns them before new ones."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Store the state after rollout ``rollout_id``."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Restore the state after rollout ``rollout_id``."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of prompts in an epoch."""


class RolloutDataSource(DataSource):
    """Groups from ``--prompt-data``, epoch after epoch.

    Invariant: all rows of earlier epochs and the first ``sample_offset`` rows of epoch ``epoch_id`` have been taken.
    Without a prompt file (``--disable-rollout-global-dataset``) groups hold empty samples.
    """

    dataset: Any = None
    """A ``Dataset``, or a subclass's replacement for it; None without a prompt file."""
    _rendering: Mapping[str, Any] = MappingProxyType({})
    """Settings that affect the rendered prompt besides the rows: flag -> value or digest."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.epoch_id = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        if args.rollout_global_dataset and args.prompt_data is not None:
            self.dataset = self._open_dataset(self._reader())
            if args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)

    def _open_dataset(self, open_one: OpenDataset) -> Any:
        return open_one({"path": self.args.prompt_data})

    def _reader(self) -> OpenDataset:
        args = self.args
        tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=Trust.of(args).trust_remote_code)
        processor = load_processor(args.hf_checkpoint, trust_remote_code=Trust.of(args).trust_remote_code)
        if args.dump_details is not None:
            tokenizer.save_pretrained(Path(args.dump_details) / "tokenizer")
            if processor is not None:
                processor.save_pretrained(Path(args.dump_details) / "processor")
        same = ("multimodal_keys", "tool_key", "metadata_key", "apply_chat_template", "apply_chat_template_kwargs")
        keywords = {name: getattr(args, name) for name in same}
        keywords |= {
            "seed": args.rollout_seed,
            "tools": toolbox(TurnsConfig.of(args)).schemas,
            "readers": readers_of(args),
        }
        self._rendering = {
            "--apply-chat-template": args.apply_chat_template,
            "--apply-chat-template-kwargs": json.dumps(args.apply_chat_template_kwargs or {}, sort_keys=True),
            "--rollout-tools": f"{digest_of(keywords['tools']):016x}",
            "the chat template of --hf-checkpoint": (
                f"{digest_of([getattr(each, 'chat_template', None) for each in (tokenizer, processor)]):016x}"
            ),
        }

        def open_one(source: Mapping[str, Any]) -> Dataset:
            keys = {"prompt_key": source.get("input_key", args.input_key)}
            keys["label_key"] = source.get("label_key", args.label_key)
            return Dataset(source["path"], tokenizer, processor, args.rollout_max_prompt_len, **keywords, **keys)

        return open_one

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next ``num_samples`` groups, continuing into the next epoch as needed."""
        return [self._new_group(row) for row in self._next_rows(num_samples)]

    def _next_rows(self, num_rows: int) -> list[Sample]:
        if self.dataset is None:
            return [Sample() for _ in range(num_rows)]
        rows: list[Sample] = []
        while len(rows) < num_rows:
            if self.sample_offset >= len(self.dataset):
                self.epoch_id += 1
                self.sample_offset = 0
                if self.args.rollout_shuffle:
                    self.dataset.shuffle(self.epoch_id)
            stop = min(len(self.dataset), self.sample_offset + num_rows - len(rows))
            rows.extend(self.dataset.samples[self.sample_offset : stop])
            self.sample_offset = stop
        return rows

    def _new_group(self, row: Sample) -> list[Sample]:
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            # Siblings share the images, which are never modified.
            sample = copy.deepcopy(row, {id(item): item for item in media_of(row)})
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Raise ConfigError: this source has no buffer."""
        raise ConfigError(
            f"{type(self).__name__} cannot take groups back; "
            "set --data-source-path slime.rollout.data_source.RolloutDataSourceWithBuffer."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the current state, which later calls on this object do not change."""
        return {
            "sample_offset": self.sample_offset,
            "epoch_id": self.epoch_id,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": copy.deepcopy(self.metadata),
            "num_prompts": len(self),
            "order": self._order(),
            "rows": {name: digests.state for name, digests in self._row_digests().items()},
        }

    def _order(self) -> dict[str, Any]:
        """Return the settings that determine the order of prompts: flag -> value, or digest of its data."""
        digests = self._row_digests().values()
        if not digests:
            return {}
        before = sum(each.before * (2 * n + 1) for n, each in enumerate(digests)) % 2**64
        order = {"--prompt-data": f"{before:016x}", "--rollout-shuffle": self.args.rollout_shuffle}
        order |= {"--rollout-seed": self.args.rollout_seed} if self.args.rollout_shuffle else {}
        return {**order, **self._rendering}

    def _row_digests(self) -> Mapping[str, RowDigests]:
        return getattr(self.dataset, "digests", {})

    def content_digest(self) -> str:
        """Return a digest, as hex text, of everything that prompts, graders and tools get from this data."""
        rows = {name: digests.state["fields"] for name, digests in self._row_digests().items()}
        return f"{digest_of([rows, dict(self._rendering)]):016x}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            DataError: ``state`` is not a position in this data.
        """
        _check_counters(state)
        self._check_order(state)
        self.sample_offset = state["sample_offset"]
        self.epoch_id = state["epoch_id"]
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = copy.deepcopy(state.get("metadata") or {})
        if self.dataset is not None and self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def _check_order(self, state: Mapping[str, Any]) -> None:
        """Check that a saved position refers to the same rows in the same order."""
        if self.dataset is None:
            return
        order, saved = self._order(), state.get("order", {})
        changed = []
        if "rows" in state:
            changed += changed_rows(state["rows"], self._row_digests())
            del order["--prompt-data"]
        else:
            unknown = [flag for flag in order if flag not in saved] + ["metadata, tools and images of --prompt-data"]
            logger.info(
                "The data position was saved by an earlier version: %s cannot be compared.", ", ".join(unknown)
            )
        changed += [
            f"{flag} was {_shown(saved[flag])} and is {_shown(order[flag])}"
            for flag in order
            if flag in saved and saved[flag] != order[flag]
        ]
        num_prompts, offset = state.get("num_prompts", len(self)), state["sample_offset"]
        if num_prompts != len(self) and not (changed and "--prompt-data" in changed[0]):
            changed.append(f"--prompt-data had {num_prompts} prompts and has {len(self)}")
        if offset > len(self):
            changed.append(f"{offset} prompts of an epoch were taken, and --prompt-data has {len(self)}")
        if not changed:
            return
        message = f"The data position was saved for other data, or another order of them: {'; '.join(changed)}."
        if not self.args.accept_other_data:
            raise DataError(
                f"{message} Prompts of epoch {state['epoch_id']} would be repeated, left out or graded otherwise. "
                "Give the data and flags of the checkpoint, or pass --accept-other-data to continue at this position."
            )
        logger.warning("%s Some prompts of epoch %d are repeated or left out.", message, state["epoch_id"])

    def save(self, rollout_id: int, state: Mapping[str, Any] | None = None) -> None:
        """Atomically store the state after rollout ``rollout_id`` under ``--save``.

        Args:
            rollout_id: Last rollout that the state counts as consumed.
            state: An earlier ``state_dict()`` to store instead of the current one, for callers that have already taken
                later groups.
        """
        if self.args.save is None:
            raise ConfigError("The data source cannot be saved: --save is not set.")
        content = dict(self.state_dict() if state is None else state)
        path = state_path(self.args.save, rollout_id)
        write_state(path, content, what="The data position")

    def load(self, rollout_id: int | None = None) -> None:
        """Continue from the state stored after rollout ``rollout_id`` under ``--load``.

        Args:
            rollout_id: Defaults to the rollout before ``args.start_rollout_id``.  If negative, nothing has been
                consumed and nothing is loaded.

        Raises:
            DataError: the state is missing, cannot be read, or belongs to other data.
        """
        if rollout_id is None:
            rollout_id = (self.args.start_rollout_id or 0) - 1
        if rollout_id < 0:
            return
        if self.args.load is None:
            logger.warning("Rollout %d begins at the start of the data: --load is not set.", rollout_id + 1)
            return
        path = state_path(self.args.load, rollout_id)
        if path.is_file():
            try:
                self.load_state_dict(read_state(path, what="The data position"))
            except DataError as error:
                raise DataError(f"--load {self.args.load}: {error}") from error
            logger.info("Data position after rollout %d restored from %s", rollout_id, path)
        elif self.dataset is not None:
            raise DataError(
                f"Training continues at rollout {rollout_id + 1}, but the data position {path} is missing; every "
                "checkpoint has one. Restore the file, load an earlier checkpoint with --ckpt-step, or start over "
                "with --start-rollout-id 0."
            )

    def __len__(self) -> int:
        """Return the number of prompts in an epoch; 0 without a prompt file."""
        return 0 if self.dataset is None else len(self.dataset)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The default source: buffered groups first, then new ones.

    Invariant: a group is either in the buffer or handed out, never both.
    """

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        self.buffer_filter = pop_first if args.buffer_filter_path is None else load_function(args.buffer_filter_path)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next ``num_samples`` groups: those that the buffer filter picks, then new ones."""
        groups = self._take_from_buffer(num_samples)
        return groups + super().get_samples(num_samples - len(groups))

    def _take_from_buffer(self, num_samples: int) -> list[list[Sample]]:
        if not self.buffer or num_samples <= 0:
            return []
        path = self.args.buffer_filter_path or "pop_first"
        call = PluginCall("--buffer-filter-path", path, self.buffer)
        taken = call_plugin(call, self.buffer_filter, self.args, None, self.buffer, num_samples)
        return check_taken(taken, self.buffer, num_samples, path)

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Append groups to the buffer: aborted ones, and finished ones that were not needed."""
        check_groups(samples, self.args.n_samples_per_prompt)
        _warn_of_objects(samples)
        self.buffer.extend(samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the current state including the buffer; later changes to the samples do not affect it."""
        return super().state_dict() | {"buffer": groups_to_state(self.buffer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; a state without a buffer empties the buffer.

        Raises:
            DataError: ``state`` is not a position in this data, or its buffer holds groups of another size.
        """
        super().load_state_dict(state)
        buffer = groups_from_state(state.get("buffer") or [])
        other = next((len(group) for group in buffer if len(group) != self.args.n_samples_per_prompt), None)
        if other is not None:
            raise DataError(
                f"The buffer of the data position holds groups of {other} samples, and --n-samples-per-prompt is "
                f"{self.args.n_samples_per_prompt}. Give {other}, or load a checkpoint with an empty buffer."
            )
        self.buffer = buffer

    def get_buffer_length(self) -> int:
        """Return the number of groups in the buffer."""
        return len(self.buffer)

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata that plug-ins store with the data position."""
        return self.metadata

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Update the metadata, which is saved and restored with the position."""
        self.metadata.update(metadata)
        _warn_of_objects(self.metadata, "metadata")


def _check_counters(state: Mapping[str, Any]) -> None:
    for name in ("sample_offset", "epoch_id", "sample_group_index", "sample_index"):
        value = state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise DataError(
                f"The data position has {name} = {value!r}; it must be a whole number >= 0. Load another checkpoint "
                "with --ckpt-step."
            )


def _shown(value: Any) -> str:
    return "on" if value is True else "off" if value is False else str(value)


# The buffer


def pop_first(
    args: Namespace, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """Remove and return the oldest ``num_samples`` groups of ``buffer``; the default ``--buffer-filter-path``."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def check_taken(taken: Any, buffer: list[list[Sample]], num_samples: int, filter_name: str) -> list[list[Sample]]:
    """Return the groups that a buffer filter picked, after checking that none can be trained twice.

    Raises:
        HookError: the filter returned too many groups, no list, or a group that is still in the buffer.
    """
    if not isinstance(taken, list) or len(taken) > num_samples:
        got = f"{len(taken)} groups" if isinstance(taken, list) else type(taken).__name__
        raise HookError(f"{filter_name} returned {got}; it must return a list of at most {num_samples} groups.")
    left = {id(group) for group in buffer}
    if any(id(group) in left for group in taken):
        raise HookError(f"{filter_name} returned a group and left it in the buffer; it must remove what it returns.")
    return taken


def check_groups(groups: list[list[Sample]], n_samples_per_prompt: int) -> None:
    """Raise DataError unless every group has ``n_samples_per_prompt`` entries."""
    for group in groups:
        if len(group) != n_samples_per_prompt:
            raise DataError(
                f"A group of {len(group)} samples was returned to the buffer; "
                f"--n-samples-per-prompt is {n_samples_per_prompt}, and groups must come back whole."
            )


def _warn_of_objects(value: Any, name: str = "Sample") -> None:
    """Warn immediately, not after a restart, about values that a checkpoint's data position cannot hold."""
    if isinstance(value, list):
        for item in value:
            _warn_of_objects(item)
        return
    fields = value.to_dict() if isinstance(value, Sample) else value
    for key, item in fields.items():
        if type(item) not in (list, str):
            with suppress(plain_values.NotPlainError):  # the whole field; the warning names it
                plain_values.dumps(item, name=f"{name}.{key}", warning="Checkpoints will not hold")


def groups_to_state(groups: list[Any]) -> list[Any]:
    """Return plain values that share nothing with the samples, so growing samples do not change them.

    A round trip through pickle is about five times as fast as ``copy.deepcopy`` on long token lists.  Objects that
    cannot be pickled (such as a client that a hook left on a sample) are left out.
    """
    plain = _to_plain(groups)
    try:
        return pickle.loads(pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception:  # user-defined objects may raise anything
        return plain_values.loads(plain_values.dumps(plain), where="The buffer")


def groups_from_state(state: list[Any]) -> list[Any]:
    """Rebuild the groups that ``groups_to_state`` stored, sharing nothing with ``state``."""
    return _from_plain(pickle.loads(pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)))


def _to_plain(value: Any) -> Any:
    return [_to_plain(item) for item in value] if isinstance(value, list) else value.to_dict()


def _from_plain(value: Any) -> Any:
    return [_from_plain(item) for item in value] if isinstance(value, list) else Sample.from_dict(value)
