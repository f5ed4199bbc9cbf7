"""The journal of one process: one cheap ``record_*`` method per event in the life of a prompt group.

The methods on the rollout path only keep references and return; the writer's thread makes the frames.  ``recovery``
and ``tools/ledger.py`` read them.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slime.ext.ledger.frames import Kind, pack_frame
from slime.ext.ledger.records import BATCH_FLAGS, SAMPLE_FLAGS
from slime.ext.ledger.sample_codec import EntryEncoder, Snapshots, issued_fields, snapshot
from slime.ext.ledger.segments import JournalWriter
from slime.rollout import plain_values
from slime.rollout.base_types import leaf_samples
from slime.utils.redaction import redacted
from slime.utils.types import Sample

PROMPT_CHARS = 160
"""Characters of a prompt stored in the head of ISSUED."""

_FINGERPRINT_FLAGS = {
    # If one of these differs, recorded samples are not what this run would generate.  Server addresses may change.
    SAMPLE_FLAGS: (
        "hf_checkpoint",
        "prompt_data",
        "input_key",
        "label_key",
        "tool_key",
        "metadata_key",
        "multimodal_keys",
        "apply_chat_template",
        "apply_chat_template_kwargs",
        "data_source_path",
        "rollout_seed",
        "rollout_shuffle",
        "rollout_max_prompt_len",
        "n_samples_per_prompt",
        "rollout_temperature",
        "rollout_top_p",
        "rollout_top_k",
        "rollout_max_response_len",
        "rollout_stop",
        "rollout_stop_token_ids",
        "rollout_skip_special_tokens",
        "rollout_max_context_len",
        "rollout_max_turns",
        "rollout_tools",
        "rollout_environment",
        "use_rollout_routing_replay",
        "custom_generate_function_path",
        "rollout_sample_hook_path",
        "rm_type",
        "custom_rm_path",
        "group_rm",
    ),
    # If one of these differs, samples are usable, but whole rollouts are not replayed.
    BATCH_FLAGS: (
        "rollout_batch_size",
        "over_sampling_batch_size",
        "partial_rollout",
        "mask_offpolicy_in_partial_rollout",
        "rollout_function_path",
        "dynamic_sampling_filter_path",
        "rollout_sample_filter_path",
        "buffer_filter_path",
    ),
}

_LATE_HOOKS = ("dynamic_sampling_filter_path", "rollout_sample_filter_path", "rollout_all_samples_process_path")
_HOOKS = ("custom_generate_function_path", "custom_rm_path", "rollout_sample_hook_path", *_LATE_HOOKS)


def config_fingerprint(args: Namespace) -> dict[str, dict[str, str]]:
    """Return the flags, as text, that must be equal for an earlier process's samples to be usable.

    Flags of extensions that are not installed count as None.
    """
    return {
        part: {name: str(redacted(getattr(args, name, None), name)) for name in names}
        for part, names in _FINGERPRINT_FLAGS.items()
    }


class UserCode(NamedTuple):
    """When user code may modify a sample's lists in place."""

    before_finish: bool = True
    """Between the answer and the group's end."""
    after_finish: bool = True
    """Between the group's end and its rollout's end."""


def user_code(args: Namespace) -> UserCode:
    """Return when this run's hooks may modify samples."""
    late = (getattr(args, name) for name in ("rollout_function_path", *_LATE_HOOKS))
    return UserCode(
        before_finish=any(getattr(args, name) for name in _HOOKS),
        after_finish=any(path and not path.startswith("slime.") for path in late),
    )


class Issued(NamedTuple):
    """A group issued to the rollout function."""

    indices: list[int]
    """``Sample.index`` of each execution; together with the group's number it identifies the execution."""
    fields: list[dict[str, Any]]
    """The fields of each sample when it was issued."""
    segment: int
    """The oldest segment that may contain a record of it."""


class _Event(NamedTuple):
    """An event queued for the writer."""

    kind: Kind
    head: dict[str, Any]
    entries: Sequence[tuple[Any, Snapshots, dict[str, Any] | None]] = ()
    """``(key, samples, fields as issued)`` of each execution in the record."""
    forget: Sequence[Any] | None = ()
    """Keys of executions whose next record must not build on earlier ones; None means all."""
    blob: bytes = b""


class Journal:
    """Records the events of one process.

    Invariant: a group recorded by ``record_issued`` is open until it is returned, filtered, handed over or discarded.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: Mapping[str, Any],
        run: str = "",
        user_code: UserCode = UserCode(),  # noqa: B008  immutable
        flush_s: float = 0.02,
        timeout_s: float = 60.0,
        is_threaded: bool = True,
    ) -> None:
        """Open ``folder`` for a new process.

        Args:
            folder: the ledger's folder.
            fingerprint: see ``config_fingerprint``; compared by recovery.
            run: id of the run.
            user_code: when user code may modify samples; by default at any time.
            flush_s, timeout_s, is_threaded: see ``JournalWriter``.
        """
        self.rollout_id = -1
        self.open: dict[int, Issued] = {}
        self._user_code = user_code
        self._encoder = EntryEncoder()
        self._process: dict[str, Any] = {"run": run, "facts": dict(fingerprint)}
        self.writer = JournalWriter(
            folder,
            self._frame,
            flush_s=flush_s,
            timeout_s=timeout_s,
            process=self._process,
            is_threaded=is_threaded,
        )

    def close(self) -> None:
        self.writer.close()

    # The rollout path

    def record_issued(self, num_wanted: int, groups: list[list[Sample]], recovered: Iterable[bool]) -> None:
        """Record that the data source was asked for ``num_wanted`` groups and returned ``groups``.

        Args:
            recovered: for each group, whether it contains samples recovered from an earlier process.
        """
        described: list[list[Any] | None] = []
        for group, is_recovered in zip(groups, recovered, strict=True):
            name = group_name(group)
            if name is None or name in self.open:
                described.append(None)
                continue
            fields = [issued_fields(next(leaf_samples(entry))) for entry in group]
            issued = Issued([values["index"] for values in fields], fields, self.writer.number)
            self.open[name] = issued
            described.append([name, issued.indices, prompt_start(fields[0]["prompt"]), is_recovered])
        self._record(Kind.ISSUED, wanted=num_wanted, groups=described)

    def record_response(self, sample: Sample, entry: Any) -> None:
        """Record that the generate function made ``entry`` from ``sample``, before hooks and reward."""
        issued = self.open.get(sample.group_index)  # type: ignore[arg-type]
        if issued is None or sample.index not in issued.indices:
            return
        key = (sample.group_index, sample.index)
        fields = issued.fields[issued.indices.index(sample.index)]
        head = {"t": time.time(), "r": self.rollout_id, "g": sample.group_index, "i": [sample.index]}
        # Hooks run right after this; all other records are made after the hooks.
        samples = snapshot(entry, copy_lists=self._user_code.before_finish)
        self.writer.put(_Event(Kind.RESPONSE, head, [(key, samples, fields)]))

    def record_finished(self, group: list[Any]) -> None:
        self._record_group(Kind.FINISHED, group)

    def record_filtered(self, group: list[Any], reason: str | None) -> None:
        name = group_name(group)
        issued = self.open.pop(name, None) if name is not None else None
        if issued is not None:
            keys = [(name, index) for index in issued.indices]
            self._record(Kind.FILTERED, forget=keys, g=name, reason=str(reason))

    def record_returned(self, groups: list[list[Any]]) -> None:
        for group in groups:
            self._record_group(Kind.RETURNED, group)
            name = group_name(group)
            if name is not None:
                self.open.pop(name, None)

    # The rollout manager

    def record_start(self, start_rollout_id: int, *, first_segment: int) -> None:
        """Record this process's first rollout, and the first segment that it has read."""
        self._record(Kind.LIFE, start=start_rollout_id, first=first_segment, **self._process)
        self.writer.flush()

    def record_begin(self, rollout_id: int) -> None:
        """Record that generation of a rollout begins, in a new segment."""
        self.writer.rotate()
        self.rollout_id = rollout_id
        self._record(Kind.BEGIN, forget=None)  # A recovery that begins here must not need earlier records.

    def record_batch(
        self, rollout_id: int, groups: list[Any], metrics: Mapping[str, Any] | None, *, keeps_open: bool
    ) -> None:
        """Record ``groups`` as the rollout's train data; returns once that is written.

        Args:
            keeps_open: whether the rollout function continues the other open groups in its next rollout; otherwise
                it has dropped them.
        """
        seen: set[int | None] = set()
        for group in groups:
            is_flat = isinstance(group, Sample)
            name = group_name([group] if is_flat else group)
            self._record_group(Kind.HANDED, [group] if is_flat else group, is_known=name not in seen, flat=is_flat)
            seen.add(name)
        for name in seen - {None}:
            self.open.pop(name, None)  # type: ignore[arg-type]
        if not keeps_open:
            if self.open:
                self._record(Kind.DISCARDED, groups=sorted(self.open))
            self.open.clear()
        try:
            blob = plain_values.dumps(dict(metrics or {}), name="metrics", warning="A replay of a rollout will lack")
        except plain_values.NotPlainError:
            blob = b"{}"
        self._record(Kind.BATCH, blob=blob, rollout=rollout_id, num_groups=len(groups), keeps_open=keeps_open)
        self.writer.flush()

    def record_trained(self, rollout_id: int) -> None:
        self._record(Kind.TRAINED, rollout=rollout_id)

    def record_published(self, rollout_id: int, first_segment: int) -> None:
        self._record(Kind.PUBLISHED, rollout=rollout_id, first=first_segment)

    # Making records

    def _record(self, kind: Kind, *, forget: Sequence[Any] | None = (), blob: bytes = b"", **values: Any) -> None:
        head = {"t": time.time(), "r": self.rollout_id, **values}
        self.writer.put(_Event(kind, head, forget=forget, blob=blob))

    def _record_group(self, kind: Kind, group: list[Any], *, is_known: bool = True, **values: Any) -> None:
        name = group_name(group)
        issued = self.open.get(name) if name is not None and is_known else None
        if issued is not None and len(issued.indices) == len(group):
            keys: list[Any] = [(name, index) for index in issued.indices]
            bases: list[dict[str, Any] | None] = list(issued.fields)
            indices: list[int] | None = issued.indices
        else:
            keys, bases, indices = [None] * len(group), [None] * len(group), None
        copies = kind is Kind.FINISHED and self._user_code.after_finish
        entries = [
            (key, snapshot(entry, copy_lists=copies), base)
            for key, entry, base in zip(keys, group, bases, strict=True)
        ]
        head = {"t": time.time(), "r": self.rollout_id, "g": name, "i": indices, **values}
        is_last = kind in (Kind.RETURNED, Kind.HANDED) and indices is not None
        self.writer.put(_Event(kind, head, entries, forget=keys if is_last else ()))

    def _frame(self, event: _Event) -> bytes:
        chunks: list[bytes] = [event.blob] if event.blob else []
        head = event.head
        if event.entries:
            hooks = self._user_code
            may_edit = hooks.after_finish if event.kind is Kind.HANDED else hooks.before_finish or hooks.after_finish
            described = []
            for key, samples, base in event.entries:
                description, data = self._encoder.encode(key, samples, base, trusts_lists=not may_edit)
                described.append(description)
                chunks += data
            head["entries"] = described
        self._encoder.forget(event.forget)
        return pack_frame(event.kind, head, b"".join(chunks))


def group_name(group: Any) -> int | None:
    """Return ``group_index`` of the group's first sample; None if the data source does not number samples."""
    entry = group
    while isinstance(entry, list):
        if not entry:
            return None
        entry = entry[0]
    name = entry.group_index
    return name if isinstance(name, int) and isinstance(entry.index, int) else None


def prompt_start(prompt: Any) -> str:
    """Return the start of a prompt (of the last message, if a list of messages), as stored in ISSUED."""
    if isinstance(prompt, list):
        prompt = str(prompt[-1].get("content", "")) if prompt and isinstance(prompt[-1], dict) else ""
    return str(prompt)[:PROMPT_CHARS]
