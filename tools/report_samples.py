"""The samples of a run for its report: figures of each rollout over all of its samples, and the facts of every sample.

Answers of evaluations have facts alone: figures and alarms are those of training.

What is computed of a file is kept while the file stays as it is: a page that is made again reads new ones only.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slime.ext.record.run_reader import Run, read_samples
from slime.ext.record.sample_record import rollout_of
from slime.flags.rollout import FULLY_ASYNC

MAX_ANSWERS = 64
DIFFERENCES = (0.0, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""Lower bounds of the bins of |trainer - engine| log-prob, nats."""
_FACTS = (
    "group", "index", "status", "drop_reason", "reward", "prompt", "response", "response_length",
    "weight_versions", "engines", "start", "end",
)  # fmt: skip
_LOG_PROBS = ("engine_log_probs", "loss_mask", "trainer_log_probs")


@dataclass
class Rollout:
    """What is known of one rollout, or of the answers of one data set in the evaluation after it."""

    number: int
    path: Path
    evaluation: str | None = None
    """Name of the data set."""
    facts: dict[str, np.ndarray] = field(default_factory=dict)
    """``group``, ``index``, ``tokens``, ``reward``, ``status`` (text) and ``prompt`` (a digest) of each sample."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Metrics ``samples/...`` over all samples."""
    differences: list[float] = field(default_factory=list)
    """Share of the trained tokens in each of ``DIFFERENCES``."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> samples."""
    rates: dict[str, float] = field(default_factory=dict)
    """Engine -> median of its answers' tokens per second."""
    answers: list[tuple[float, float, int, str]] = field(default_factory=list)
    """Start, end (seconds since the epoch), tokens and engine of the slowest answers and some others."""


def read_rollouts(run: Run) -> list[Rollout]:
    """Return every recorded rollout; files that are being written are left out."""
    found = []
    clip = (float(run.value("eps_clip", 0.2)), float(run.value("eps_clip_high", run.value("eps_clip", 0.2))))
    trained: dict[int, list[Path]] = {}
    for path in run.sample_files("train"):
        trained.setdefault(rollout_of(path), []).append(path)
    for path in run.sample_files():
        paths = (path, *trained.get(rollout_of(path), ()))
        if (stamps := _stamps(paths)) and (rollout := _rollout_of(paths, stamps, clip)) is not None:
            found.append(rollout)
    newest = [rollout.figures.get("samples/newest_version") for rollout in found]
    for rollout, late in zip(found, late_pushes(newest, per_version=_rollouts_a_version(run))):
        rollout.figures["samples/late_pushes"] = late
    return found


def _rollouts_a_version(run: Run) -> float:
    """Return how many rollouts in a row one version may answer: till the next push, and as many as may lie ready."""
    staleness = run.value("max_staleness", None)
    if staleness is None:
        staleness = math.inf if str(run.value("rollout_function_path", "")) == FULLY_ASYNC else 0
    return float(run.value("update_weights_interval", 1)) * (1 + staleness)


def late_pushes(newest: Sequence[int | None], *, per_version: float) -> list[float]:
    """Return by how many rollouts the newest version of each rollout has answered longer than it may."""
    found, since = [], 0
    for before, version in zip((None, *newest), newest):
        since = since + 1 if version is not None and version == before else 0
        found.append(max(0.0, since + 1 - per_version))
    return found


def read_evaluations(run: Run) -> list[Rollout]:
    """Return the answers to every recorded evaluation, each data set by itself; they have no figures."""
    paths = run.sample_files("eval")
    return [one for path in paths if (stamps := _stamps([path])) for one in _evaluations_of(path, stamps)]


def prompt_rewards(rollout: Rollout) -> list[float]:
    """Return the mean reward of each prompt's answers that count: answers to one prompt depend on each other."""
    facts = rollout.facts
    kept = np.isfinite(facts["reward"]) & np.array([not one.startswith("dropped: ") for one in facts["status"]], bool)
    keys = np.stack([facts["group"][kept].astype(np.uint64), facts["prompt"][kept]])  # an evaluation has no groups
    _, place = np.unique(keys, axis=1, return_inverse=True)
    return (np.bincount(place, facts["reward"][kept]) / np.bincount(place)).tolist()


def _stamps(paths: Sequence[Path]) -> tuple[int, ...]:
    """Return the times of files; empty where the run has just removed one of them, of its oldest."""
    try:
        return tuple(one.stat().st_mtime_ns for one in paths)
    except FileNotFoundError:
        return ()


@functools.lru_cache(maxsize=4096)
def _evaluations_of(path: Path, stamps: tuple[int, ...]) -> list[Rollout]:
    """Return what a file of answers tells; a change of ``stamps``, its time, makes it be read again."""
    if (table := read_samples(path, ("evaluation", *_FACTS), ())) is None:
        return []
    found = []
    for name in table["evaluation"].unique().to_pylist():
        columns = table.filter(pc.equal(table["evaluation"], name)).to_pydict()
        columns["prompt"] = [f"{name}\0{text}" for text in columns["prompt"]]  # training may have the same prompts
        facts = _facts(columns, [f"evaluation: {name}"] * len(columns["prompt"]))
        found.append(Rollout(rollout_of(path), path, name, facts))
    return found


@functools.lru_cache(maxsize=4096)
def _rollout_of(paths: tuple[Path, ...], stamps: tuple[int, ...], clip: tuple[float, float]) -> Rollout | None:
    """Return what a rollout's files tell; a change of ``stamps``, their times, makes them be read again."""
    if (table := read_samples(paths[0], (*_FACTS, *_LOG_PROBS), paths[1:])) is None:
        return None
    columns = {name: table[name].to_pylist() for name in table.column_names if name in _FACTS}
    rollout = Rollout(rollout_of(paths[0]), paths[0])
    reasons, statuses = columns["drop_reason"], columns["status"]
    rollout.dropped = dict(Counter(reason for reason in reasons if reason))
    rollout.facts = _facts(columns, [f"dropped: {r}" if r else s for r, s in zip(reasons, statuses)])
    kept = np.array([not reason for reason in reasons], bool)
    rollout.figures = _rewards(rollout.facts, kept) | _texts(columns, rollout.facts, kept) | _versions(columns, kept)
    rollout.rates = _rates(columns)
    rollout.figures |= _slowest(rollout.rates)
    rollout.answers = _answers(columns)
    if (differences := _differences(table)) is not None and len(differences):
        bins = np.searchsorted(DIFFERENCES, np.abs(differences), side="right") - 1
        rollout.differences = (np.bincount(bins, minlength=len(DIFFERENCES)) / len(bins)).round(4).tolist()
        rollout.figures |= _ratios(differences, clip)
    return rollout


def _facts(columns: Mapping[str, list[Any]], statuses: Sequence[str]) -> dict[str, np.ndarray]:
    return {
        "group": np.array([-1 if one is None else one for one in columns["group"]], np.int64),
        "index": np.array([-1 if one is None else one for one in columns["index"]], np.int64),
        "tokens": np.array([one or 0 for one in columns["response_length"]], np.int64),
        "reward": np.array([math.nan if one is None else one for one in columns["reward"]], np.float64),
        "status": np.array(statuses, object),
        "prompt": np.array([_digest(one) for one in columns["prompt"]], np.uint64),
    }


def _digest(text: str | None) -> int:
    return int.from_bytes(hashlib.blake2b((text or "").encode(), digest_size=8).digest(), "big")


def _quantiles(name: str, values: np.ndarray, **shares: float) -> dict[str, float]:
    found = np.quantile(values, list(shares.values())) if len(values) else []
    return {f"{name}/{label}": float(value) for label, value in zip(shares, found)}


def _rewards(facts: Mapping[str, np.ndarray], kept: np.ndarray) -> dict[str, Any]:
    """Return rewards over prompts, groups whose rewards are equal, and whether length is what pays."""
    kept = kept & np.isfinite(facts["reward"])
    rewards, tokens = facts["reward"][kept], facts["tokens"][kept].astype(np.float64)
    if not len(rewards):
        return {}
    _, group = np.unique(facts["group"][kept], return_inverse=True)
    size = np.bincount(group)
    mean, length = np.bincount(group, rewards) / size, np.bincount(group, tokens) / size
    change, longer = rewards - mean[group], tokens - length[group]
    spread = np.sqrt(np.bincount(group, change**2) / size)
    found: dict[str, Any] = _quantiles("samples/reward", mean, low=0.1, middle=0.5, high=0.9)
    found |= {"samples/reward/mean": float(rewards.mean()), "samples/groups": len(size)}
    if (several := size > 1).any():
        found["samples/group_spread"] = float(spread[several].mean())
        found["samples/equal_groups"] = float((spread[several] < 1e-12).mean())
    scale = math.sqrt(float((change**2).sum() * (longer**2).sum()))
    if scale > 0:
        found["samples/length_pays"] = float((change * longer).sum() / scale)
    return found


def _texts(columns: Mapping[str, list[Any]], facts: Mapping[str, np.ndarray], kept: np.ndarray) -> dict[str, Any]:
    """Return lengths, answers that were cut off, and answers that another one of their group repeats."""
    if not kept.any():
        return {}
    answers = [(g, text) for g, text, is_kept in zip(columns["group"], columns["response"], kept) if is_kept]
    found: dict[str, Any] = _quantiles("samples/length", facts["tokens"][kept], low=0.1, middle=0.5, high=0.9, max=1)
    found["samples/truncated"] = float((facts["status"][kept] == "truncated").mean())
    found["samples/duplicates"] = 1 - len(set(answers)) / len(answers)
    return found


def _versions(columns: Mapping[str, list[Any]], kept: np.ndarray) -> dict[str, Any]:
    """Return the newest version, and by how much the oldest of each sample is behind it."""
    versions = [
        [int(one) for one in names if str(one).isdigit()]
        for names, is_kept in zip(columns["weight_versions"], kept)
        if is_kept and names
    ]
    oldest = [min(one) for one in versions if one]
    if not oldest:
        return {}
    newest = max(max(one) for one in versions if one)
    lag = newest - np.array(oldest)
    return {
        "samples/newest_version": newest, "samples/lag/mean": float(lag.mean()), "samples/lag/max": int(lag.max())
    }  # fmt: skip


def _answers(columns: Mapping[str, list[Any]]) -> list[tuple[float, float, int, str]]:
    names = columns.get("engines") or [None] * len(columns["start"])
    rows = [
        (start, end, tokens or 0, (engines or [""])[-1])
        for start, end, tokens, engines in zip(columns["start"], columns["end"], columns["response_length"], names)
        if start is not None and end is not None
    ]
    rows.sort(key=lambda one: one[0] - one[1])
    slowest = rows[: MAX_ANSWERS // 4]
    others = rows[len(slowest) :]
    return slowest + others[:: max(1, math.ceil(len(others) / (MAX_ANSWERS - len(slowest) or 1)))]


def _rates(columns: Mapping[str, list[Any]]) -> dict[str, float]:
    """Return the median of the tokens per second of an answer, by engine; of answers that one engine gave."""
    rates: dict[str, list[float]] = {}
    for names, start, end, tokens in zip(
        columns.get("engines", []), columns["start"], columns["end"], columns["response_length"]
    ):
        if names and names[0] and len(set(names)) == 1 and start is not None and end > start and tokens:
            rates.setdefault(names[0], []).append(tokens / (end - start))
    return {name: float(np.median(values)) for name, values in sorted(rates.items()) if len(values) > 1}


def _slowest(rates: Mapping[str, float]) -> dict[str, Any]:
    if len(rates) < 2:
        return {}
    name, rate = min(rates.items(), key=lambda one: one[1])
    others = float(np.median([value for other, value in rates.items() if other != name]))
    return {"samples/slowest_engine": name, "samples/slowest_share": rate / others}


def _differences(both: pa.Table) -> np.ndarray | None:
    """Return trainer - engine, in nats, of every token that was trained on; None when either is not recorded."""
    if "trainer_log_probs" not in both.column_names:
        return None
    sizes = [pc.list_value_length(both[name]) for name in ("engine_log_probs", "trainer_log_probs")]
    both = both.filter(pc.equal(*sizes))  # null, and so left out, where one is not there
    trainer, engine = (
        pc.list_flatten(both[name]).to_numpy().astype(np.float64) for name in ("trainer_log_probs", "engine_log_probs")
    )
    difference = trainer - engine
    masks, sizes = both["loss_mask"].to_pylist(), pc.list_value_length(both["engine_log_probs"]).to_pylist()
    if any(mask and not all(mask) for mask in masks):
        whole = [mask if mask and len(mask) == size else [1] * size for mask, size in zip(masks, sizes)]
        difference = difference[np.concatenate([np.asarray(mask, bool) for mask in whole])]
    return difference[np.isfinite(difference)]


def _ratios(differences: np.ndarray, clip: tuple[float, float]) -> dict[str, float]:
    ratios = np.exp(np.clip(differences, -20, 20))
    outside = (ratios < 1 - clip[0]) | (ratios > 1 + clip[1])
    return {
        **_quantiles("samples/difference", np.abs(differences), middle=0.5, high=0.99, max=1),
        **_quantiles("samples/ratio", ratios, min=0, low=0.01, middle=0.5, high=0.99, max=1),
        "samples/difference/mean": float(np.abs(differences).mean()),
        "samples/outside_clip": float(outside.mean()),
    }
