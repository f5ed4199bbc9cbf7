"""The samples of a run in Parquet: ``samples/rollout_000012.parquet`` of the rollout manager, one row a sample, and
``samples/train_000012_r0.parquet`` of each data-parallel rank, by the sample's ``position`` in the rollout.
``samples/eval_000012.parquet`` has the answers of the evaluation after that rollout, ``eval_start`` those before all.

Per-token columns cover the response, ``tokens`` the prompt too.  Dropped samples have a ``drop_reason`` and no
``position``.  Log-probs are nats in fp32, advantages fp32; all columns are compressed with zstd.  What training reads
of a sample is there to the bit, and :func:`sample_of` gives it back for a replay; ``lacks`` names what is too large.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from slime.ext.record.flags import RecordConfig
from slime.ext.record.sample_pictures import SmallCopies
from slime.ext.record.writer import SAMPLES_FOLDER, RecordWriter
from slime.observability.rollout_metrics import REQUEST_SPANS, completion_tokens
from slime.observability.trace_utils import finished_spans
from slime.utils.errors import DataError
from slime.utils.files import replace_file
from slime.utils.types import Sample

_INTS, _FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())
ROLLOUT_SCHEMA = pa.schema(
    [
        ("rollout", pa.int32()), ("position", pa.int32()), ("group", pa.int64()), ("index", pa.int64()),
        ("status", pa.string()), ("drop_reason", pa.string()), ("reward", pa.float64()), ("reward_json", pa.string()),
        ("train_reward", pa.float64()), ("prompt", pa.string()), ("response", pa.string()), ("label", pa.string()),
        ("tokens", _INTS), ("response_length", pa.int32()), ("loss_mask", pa.list_(pa.int8())),
        ("engine_log_probs", _FLOATS), ("weight_versions", pa.list_(pa.string())), ("call_tokens", _INTS),
        ("engines", pa.list_(pa.string())), ("start", pa.float64()), ("end", pa.float64()), ("execution", pa.int64()),
        ("is_removed", pa.bool_()), ("teacher_log_probs", _FLOATS), ("metadata", pa.string()),
        ("lacks", pa.list_(pa.string())), ("picture_ids", pa.list_(pa.string())), ("pictures", pa.list_(pa.binary())),
    ]
)  # fmt: skip
"""``call_tokens[i]`` response tokens were drawn in the engine call with ``weight_versions[i]``, by ``engines[i]``
(host:port; empty where an engine does not say).  ``pictures[i]`` is null where an earlier row has
``picture_ids[i]``."""
EVALUATION_SCHEMA = ROLLOUT_SCHEMA.append(pa.field("evaluation", pa.string()))
"""``evaluation`` is the name of the data set; a ``position`` is one in its answers."""
TRAIN_SCHEMA = pa.schema(
    [
        ("position", pa.int32()), ("dp_rank", pa.int32()), ("micro_batch", pa.int32()),
        ("trainer_log_probs", _FLOATS), ("advantages", _FLOATS), ("clipped", pa.list_(pa.bool_())),
    ]
)  # fmt: skip
TOO_LARGE = (
    "rollout_top_p_token_ids", "rollout_routed_experts", "multimodal_train_inputs",
)  # fmt: skip
"""Fields of a sample that training reads and that take more than a record may."""
SAMPLES = Path(SAMPLES_FOLDER)
"""In the run's folder."""
MAX_SOURCE = 2048
"""Characters of a path or address of a picture; what is longer holds the picture itself."""
BEFORE_ALL = -1
"""The rollout after which the first evaluation of a run comes."""
STRAGGLER_SHARE = 0.03
"""The last requests of a rollout: the time in which only they run is spent waiting for the longest answers."""


def record_rollout(
    writer: RecordWriter,
    config: RecordConfig,
    rollout_id: int,
    samples: Sequence[Sample],
    rewards: Sequence[float] | None,
    *,
    is_loaded: bool = False,
    dropped: Sequence[tuple[Sample, str]] = (),
) -> None:
    """Write the samples of one rollout.

    Args:
        writer: of the process.
        config: of the run.
        rollout_id: the rollout.
        samples: by position.
        rewards: of each sample as the estimator takes them, when they are known.
        is_loaded: the samples are of another run or from before a restart, and so are the times of their requests.
        dropped: samples that a filter left out, and why.
    """
    limit = config.record_samples
    trained = list(rewards) if rewards is not None else [None] * len(samples)

    def rows() -> list[dict[str, Any]]:
        if not is_loaded:
            record_phases(writer, samples)
        copies = SmallCopies()
        key = config.reward_key
        kept = [_row(rollout_id, i, sample, None, trained[i], copies, key) for i, sample in enumerate(samples[:limit])]
        return kept + [_row(rollout_id, None, sample, reason, None, copies, key) for sample, reason in dropped[:limit]]

    _write(writer, samples_path(SAMPLES, rollout_id), rows, ROLLOUT_SCHEMA, config)


def record_evaluation(
    writer: RecordWriter, config: RecordConfig, rollout_id: int | None, data: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the answers of one evaluation.

    Args:
        writer: of the process.
        config: of the run.
        rollout_id: the rollout before it; None before all.
        data: data set -> its results, of which ``samples`` may be missing.
    """
    limit, number = config.record_samples, BEFORE_ALL if rollout_id is None else rollout_id
    answers = {name: list(result.get("samples") or ())[:limit] for name, result in data.items()}
    if not any(answers.values()):
        return

    def rows() -> list[dict[str, Any]]:
        copies = SmallCopies()
        return [
            _row(number, position, sample, None, None, copies, config.eval_reward_key) | {"evaluation": _text(name)}
            for name, samples in answers.items()
            for position, sample in enumerate(samples)
        ]

    _write(writer, evaluation_path(SAMPLES, number), rows, EVALUATION_SCHEMA, config)


def record_trained(
    writer: RecordWriter,
    config: RecordConfig,
    rollout_id: int,
    rank: int,
    positions: Sequence[int],
    columns: Mapping[str, Sequence[Any]],
    micro_batches: Sequence[int] = (),
) -> None:
    """Write what the trainer added to the samples of one data-parallel rank.

    Args:
        writer: of the process.
        config: of the run.
        rollout_id: the rollout.
        rank: data-parallel.
        positions: of the samples in the rollout.
        columns: name -> one host tensor for each sample; ``clipped`` is not 0 where the trust region set the loss.
        micro_batches: number of each sample's, of all steps on this rank.
    """
    limit = config.record_samples

    def rows() -> list[dict[str, Any]]:
        return [
            {"position": position, "dp_rank": rank, "micro_batch": micro_batches[i] if micro_batches else None}
            | {name: (column[i] != 0 if name == "clipped" else column[i]).numpy() for name, column in columns.items()}
            for i, position in enumerate(positions)
            if limit is None or position < limit
        ]

    _write(writer, samples_path(SAMPLES, rollout_id, rank), rows, TRAIN_SCHEMA, config)


def _write(
    writer: RecordWriter,
    place: Path,
    rows: Callable[[], list[dict[str, Any]]],
    schema: pa.Schema,
    config: RecordConfig,
) -> None:
    """Have the writer's thread make rows and write them to a file of the run's folder.

    What it cost is recorded (rows of the trainer have no tokens of their own), and the limit is kept.
    """

    def work(folder: Path) -> None:
        began_s, path, made = time.thread_time(), folder / place, rows()
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist([{column: row.get(column) for column in schema.names} for row in made], schema)
        replace_file(path, lambda file: _write_parquet(table, file), to_disk=False)
        num_tokens = sum(len(row.get("tokens", ())) for row in made)
        cost = {"bytes": path.stat().st_size, "tokens": num_tokens, "cpu_s": round(time.thread_time() - began_s, 4)}
        writer.event("recorded", {"file": path.name, "samples": len(made), **cost})
        if removed := _rotate(path.parent, config.record_max_gib):
            writer.event("rotated", {"files": removed})

    writer.submit(work)


def _write_parquet(table: pa.Table, file: IO[bytes]) -> None:
    floats = [f"{one.name}.list.element" for one in table.schema if one.type == _FLOATS]
    pq.write_table(
        table,
        file,
        compression="zstd",
        compression_level=3,
        use_dictionary=[one.name for one in table.schema if f"{one.name}.list.element" not in floats],
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
        write_page_checksum=True,
    )


def _rotate(folder: Path, max_gib: float) -> list[str]:
    """Remove the files of the oldest rollouts while all of them together are too large; return their names."""
    sizes = {path: path.stat().st_size for path in folder.glob("*.parquet")}
    total, removed = sum(sizes.values()), []
    for path in sorted(sizes, key=lambda one: (rollout_of(one), one.name))[:-1]:
        if total <= max_gib * 2**30:
            break
        path.unlink(missing_ok=True)
        total -= sizes[path]
        removed.append(path.name)
    return removed


def samples_path(folder: Path, rollout_id: int, rank: int | str | None = None) -> Path:
    """Return the file of a rollout's samples, or of what the trainer's data-parallel ``rank`` added to them.

    Args:
        folder: of the samples.
        rollout_id: the rollout.
        rank: a number, or ``*`` for a pattern of those of all ranks.
    """
    name = f"rollout_{rollout_id:06d}" if rank is None else f"train_{rollout_id:06d}_r{rank}"
    return folder / f"{name}.parquet"


def evaluation_path(folder: Path, rollout_id: int) -> Path:
    """Return the file of the answers of the evaluation after a rollout, or ``BEFORE_ALL``."""
    return folder / f"eval_{'start' if rollout_id == BEFORE_ALL else f'{rollout_id:06d}'}.parquet"


def rollout_of(path: Path) -> int:
    """Return the rollout that a file of samples belongs to; of an evaluation the one before it."""
    number = path.stem.split("_")[1]
    return BEFORE_ALL if number == "start" else int(number)


def _row(
    rollout_id: int,
    position: int | None,
    sample: Sample,
    drop_reason: str | None,
    train_reward: float | None,
    copies: SmallCopies,
    reward_key: str | None,
) -> dict[str, Any]:
    reward = sample.reward
    entry = reward.get(reward_key) if reward_key and isinstance(reward, Mapping) else reward
    number = float(entry) if isinstance(entry, Real) and sample.is_graded else None  # what statistics read
    is_number = reward is None or (number is not None and entry is reward)
    calls = list(finished_spans([sample], REQUEST_SPANS))
    metadata, lacks = _metadata(sample)
    return {
        "rollout": rollout_id,
        "position": position,
        "group": sample.group_index,
        "index": sample.index,
        "status": sample.status.value,
        "drop_reason": drop_reason,
        "reward": number,
        "reward_json": None if is_number else json.dumps(reward, default=_number),
        "train_reward": train_reward,
        "prompt": _text(_prompt(sample.prompt)),
        "response": _text(sample.response),
        "label": None if sample.label is None else _text(str(sample.label)),
        "tokens": sample.tokens,
        "response_length": sample.response_length,
        "loss_mask": sample.loss_mask,
        "engine_log_probs": sample.rollout_log_probs,
        "weight_versions": [str(version) for version in sample.weight_versions],
        "call_tokens": [completion_tokens(attrs) for _, _, attrs in calls],
        "engines": [str(attrs.get("engine") or "") for _, _, attrs in calls],
        "start": min((start for start, _, _ in calls), default=None),
        "end": max((end for _, end, _ in calls), default=None),
        "execution": sample.rollout_id,
        "is_removed": sample.remove_sample,
        "teacher_log_probs": sample.teacher_log_probs,
        "metadata": metadata,
        "lacks": [*lacks, *(name for name in TOO_LARGE if getattr(sample, name) is not None)],
        **copies.columns(sample),
    }


def _prompt(prompt: Any) -> str:
    """Return a prompt as text; messages as JSON, in which a picture that is no path or address is a word."""
    if isinstance(prompt, str):
        return prompt
    messages = [
        {**one, "content": [_without_pixels(part) for part in one["content"]]}
        if isinstance(one, Mapping) and isinstance(one.get("content"), list)
        else one
        for one in (prompt if isinstance(prompt, list) else [prompt])
    ]
    whole = messages if isinstance(prompt, list) else messages[0]
    return json.dumps(whole, ensure_ascii=False, default=lambda value: f"({type(value).__name__})")


def _without_pixels(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    return {
        name: f"({len(value)} characters)"
        if name in ("image", "image_url", "url", "bytes") and isinstance(value, str) and len(value) > MAX_SOURCE
        else _without_pixels(value)
        for name, value in part.items()
    }


def _number(value: Any) -> Any:
    """Return a number of numpy or torch as JSON has it, and anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _metadata(sample: Sample) -> tuple[str | None, list[str]]:
    """Return the metadata as JSON, and the names of what cannot be told in it."""
    metadata = {name: value for name, value in (sample.metadata or {}).items() if name != "teacher_top"}
    lacks = ["metadata['teacher_top']"] if len(metadata) < len(sample.metadata or {}) else []
    if not metadata and sample.train_metadata is None:
        return None, lacks
    try:
        return _text(json.dumps([metadata, sample.train_metadata], ensure_ascii=False)), lacks
    except (TypeError, ValueError):
        return None, [*lacks, "metadata"]


def sample_of(row: Mapping[str, Any]) -> Sample:
    """Return the sample of a row, as far as training reads it.

    Raises:
        DataError: the record leaves out something that it reads.
    """
    if "lacks" not in row or row["lacks"]:
        missing = ", ".join(row.get("lacks") or ("what a replay needs",))
        raise DataError(
            f"the record of sample {row['index']} lacks {missing}; record the run with --save-debug-rollout-data, or "
            "with a version that records them."
        )
    metadata, train_metadata = json.loads(row["metadata"] or "[{}, null]")
    return Sample(
        group_index=row["group"],
        index=row["index"],
        rollout_id=row["execution"],
        prompt=row["prompt"],
        tokens=row["tokens"],
        response=row["response"],
        response_length=row["response_length"],
        label=row["label"],
        reward=row["reward"] if row["reward_json"] is None else json.loads(row["reward_json"]),
        loss_mask=row["loss_mask"],
        weight_versions=row["weight_versions"],
        rollout_log_probs=row["engine_log_probs"],
        remove_sample=row["is_removed"],
        teacher_log_probs=row["teacher_log_probs"],
        status=row["status"],
        metadata=metadata,
        train_metadata=train_metadata,
    )


def _text(text: str) -> str:
    """Return ``text`` as UTF-8 can hold it: half a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _generation(sample: Sample) -> list[tuple[float, float]]:
    """Return start and end of the sample's requests.

    A generate function of the user's leaves no spans of its requests: the time in it counts, tools included.
    """
    if requests := [(start, end) for start, end, _ in finished_spans([sample], REQUEST_SPANS)]:
        return requests
    graded = [start for start, *_ in finished_spans([sample], ("reward_model",))]
    calls = finished_spans([sample], ("generate_and_rm",))
    return [(start, min((at for at in graded if start <= at <= end), default=end)) for start, end, _ in calls]


def record_phases(writer: RecordWriter, samples: Sequence[Sample]) -> None:
    """Record the phases of a rollout as spans: generation, the wait for the longest answers, and for rewards."""
    requests = sorted((one for sample in samples for one in _generation(sample)), key=lambda one: one[1])
    if not requests:
        return
    last, most = requests[-1][1], requests[max(0, int(len(requests) * (1 - STRAGGLER_SHARE)) - 1)][1]
    busy: list[tuple[float, float]] = []  # an answer that a push or the end of a rollout cut has requests far apart
    for start, end in sorted(requests):
        if busy and start <= busy[-1][1]:
            busy[-1] = busy[-1][0], max(end, busy[-1][1])
        else:
            busy.append((start, end))
    for start, end in busy:
        writer.add_span("generation", start, min(end, max(start, most)), {"requests": len(requests)})
    writer.add_span("longest answer", max(most, busy[-1][0]), last, {})
    graded = max((end for _, end, _ in finished_spans(samples, ("reward_model", "group_reward_model"))), default=last)
    if graded > last:
        writer.add_span("reward", last, graded, {})
