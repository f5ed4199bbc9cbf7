"""Several data sets as one stream of prompts: ``--prompt-data mix.yaml``.

The next prompt comes from the data set that is furthest behind its weight; each data set has its own order and its own
epochs.  A prompt whose answers were all right, or all wrong, may be left out of the next epochs.  Which prompt comes
next depends on the file, the seed, and the state that checkpoints keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from typing import Any

from slime.flags.yaml_file import read_yaml
from slime.rollout.base_types import leaf_samples
from slime.rollout.prompt_dataset import Dataset, RowDigests
from slime.rollout.run_state import GroupObserver
from slime.utils.errors import ConfigError, DataError
from slime.utils.types import Sample

FLAG = "--prompt-data"
_SOURCE_KEYS = ("path", "name", "weight", "input_key", "label_key")
_TEXTS = {"path", "name", "input_key"}
_CURRICULUM = {"solved": 1.0, "low": 0.0, "high": 1.0, "skip_epochs": 2}


@dataclass(frozen=True)
class Mix:
    """The content of a mix.yaml."""

    sources: list[dict[str, Any]]
    curriculum: dict[str, float] | None
    """``solved``: the reward of a right answer; a prompt whose share of them is at most ``low``, or at least ``high``,
    is left out of the next ``skip_epochs`` epochs of its data set."""


def is_mix(path: str) -> bool:
    """Return True for the path of a mix.yaml."""
    return path.endswith((".yaml", ".yml"))


def sources_of(path: str) -> list[dict[str, Any]]:
    """Return the data sets of ``--prompt-data``, one or several, each with its path at least."""
    return read_mix(path).sources if is_mix(path) else [{"path": path}]


def read_mix(path: str) -> Mix:
    """Return the content of a mix.yaml.

    Raises:
        ConfigError: it has other keys, or values that cannot work.
    """
    content = read_yaml(path, FLAG)
    sources = content.get("datasets") if isinstance(content, Mapping) else None
    if not isinstance(sources, list) or not sources or set(content) - {"datasets", "curriculum"}:
        raise ConfigError(f"{FLAG} {path}: write 'datasets:' with a list of data sets, and maybe 'curriculum:'.")
    for source in sources:
        if not isinstance(source, Mapping) or "path" not in source or set(source) - set(_SOURCE_KEYS):
            raise ConfigError(
                f"{FLAG} {path}: {source!r}; a data set has path, and maybe {', '.join(_SOURCE_KEYS[1:])}."
            )
        for key in _TEXTS & source.keys():
            if not source[key] or not isinstance(source[key], str):
                raise ConfigError(f"{FLAG} {path}: {key} is {source[key]!r}; it is a text, or is left out.")
        _points(source, path)
    named = [{**source, "name": str(source.get("name", source["path"]))} for source in sources]
    names = [source["name"] for source in named]
    if len(set(names)) < len(names):
        raise ConfigError(f"{FLAG} {path}: two data sets are named alike ({', '.join(names)}); give them names.")
    curriculum = content.get("curriculum")
    if curriculum is not None:
        wrong = not isinstance(curriculum, Mapping) or set(curriculum) - set(_CURRICULUM)
        if wrong or not all(_is_number(value) for value in curriculum.values()):
            raise ConfigError(
                f"{FLAG} {path}: curriculum is {curriculum!r}; it has numbers: {', '.join(_CURRICULUM)}."
            )
        curriculum = _CURRICULUM | dict(curriculum)
        low, high, epochs = (curriculum[name] for name in ("low", "high", "skip_epochs"))
        if low >= high or epochs != int(epochs) or epochs < 0:
            raise ConfigError(
                f"{FLAG} {path}: curriculum has low {low}, high {high}, skip_epochs {epochs}; low must be below high, "
                "and skip_epochs a whole number from 0 on."
            )
    return Mix(named, curriculum)


def _points(source: Mapping[str, Any], path: str) -> list[tuple[float, float]]:
    """Return (prompts taken, weight), of one weight or of a schedule, in order."""
    weight = source.get("weight", 1)
    points = list((weight if isinstance(weight, Mapping) else {0: weight}).items())
    if not points or not all(_is_number(x) and x >= 0 for point in points for x in point):
        raise ConfigError(
            f"{FLAG} {path}: weight is {weight!r}; it is a number from 0 on, or a map of prompts taken to weights."
        )
    return sorted(points)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


@dataclass
class _MixedSet:
    """A data set, and the place where the stream is in it."""

    name: str
    dataset: Dataset
    points: list[tuple[float, float]]
    position: dict[str, float] = field(default_factory=lambda: {"offset": 0, "epoch": 0, "credit": 0.0, "taken": 0})
    due: dict[int, int] = field(default_factory=dict)
    """Row -> the epoch from which on it comes again."""
    counts: dict[str, float] = field(default_factory=dict)
    """Since the last metrics."""

    def count(self, name: str, by: float = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + by

    def weight(self, num_taken: int) -> float:
        """Return the weight after so many prompts, on the line between two points of the schedule."""
        if num_taken <= self.points[0][0]:
            return self.points[0][1]
        for (start, low), (stop, high) in pairwise(self.points):
            if num_taken < stop:
                return low + (high - low) * (num_taken - start) / (stop - start)
        return self.points[-1][1]


class Mixture(GroupObserver):
    """The stream; in place of a ``Dataset``."""

    def __init__(
        self,
        path: str,
        open_dataset: Callable[[Mapping[str, Any]], Dataset],
        *,
        is_shuffled: bool,
        reward_key: str | None = None,
    ) -> None:
        """Open the data sets of ``path``.

        Args:
            path: of the mix.yaml.
            open_dataset: gets the entry of a data set.
            is_shuffled: each epoch of a data set has its own order.
            reward_key: entry of the rewards that are dicts (``--reward-key``).
        """
        mix = read_mix(path)
        self._path, self._is_shuffled, self._curriculum = path, is_shuffled, mix.curriculum
        self._reward_key = reward_key
        self._sources = [_MixedSet(one["name"], open_dataset(one), _points(one, path)) for one in mix.sources]
        self._by_name = {source.name: source for source in self._sources}
        for source in self._sources:
            for row, sample in enumerate(source.dataset.origin_samples):
                sample.metadata |= {"source_name": source.name, "source_row": row}
            self._turn_to(source, 0)

    @property
    def digests(self) -> dict[str, RowDigests]:
        """What tells the data sets from others, by name; weights may change."""
        return {source.name: source.dataset.digests[""] for source in self._sources}

    @property
    def fingerprint(self) -> int:
        """The digest that positions of earlier versions hold."""
        return sum(source.dataset.fingerprint * (2 * n + 1) for n, source in enumerate(self._sources)) % 2**64

    def __len__(self) -> int:
        """Return the prompts of all data sets."""
        return sum(len(source.dataset) for source in self._sources)

    def shuffle(self, new_epoch_id: int) -> None:
        """Do nothing: each data set counts its epochs."""

    def take(self, num_rows: int) -> list[Sample]:
        """Return the next prompts of the stream."""
        return [self._next_row(self._next_source()) for _ in range(num_rows)]

    def _next_source(self) -> _MixedSet:
        num_taken = int(sum(source.position["taken"] for source in self._sources))
        weights = [source.weight(num_taken) for source in self._sources]
        total = sum(weights)
        if total <= 0:
            raise DataError(f"{FLAG} {self._path}: after {num_taken} prompts every weight is 0; give one that is not.")
        for source, weight in zip(self._sources, weights, strict=True):
            source.position["credit"] += weight / total
        chosen = max(
            (source for source, weight in zip(self._sources, weights, strict=True) if weight > 0),
            key=lambda source: source.position["credit"],
        )
        chosen.position["credit"] -= 1.0
        chosen.position["taken"] += 1
        chosen.count("prompts")
        return chosen

    def _next_row(self, source: _MixedSet) -> Sample:
        """Return the next row that is not left out.  It ends: with the epochs every row becomes due again."""
        while True:
            if source.position["offset"] >= len(source.dataset):
                self._turn_to(source, self._next_epoch(source))
            sample = source.dataset.samples[int(source.position["offset"])]
            source.position["offset"] += 1
            if source.due.get(sample.metadata["source_row"], 0) <= source.position["epoch"]:
                return sample
            source.count("left_out")

    def _next_epoch(self, source: _MixedSet) -> int:
        """Return the next epoch that has a row to take; those before it are not walked through row by row."""
        following = int(source.position["epoch"]) + 1
        first_due = min((source.due.get(row, 0) for row in range(len(source.dataset))), default=0)
        epoch = max(following, first_due)
        source.count("left_out", (epoch - following) * len(source.dataset))
        return epoch

    def _turn_to(self, source: _MixedSet, epoch: int) -> None:
        if epoch != source.position["epoch"]:
            source.position |= {"epoch": epoch, "offset": 0}
        if self._is_shuffled:
            source.dataset.shuffle(epoch)

    def finished(self, group: list[Any]) -> None:
        """Note how many answers of a prompt were right."""
        samples = [sample for sample in leaf_samples(group) if not sample.remove_sample]
        rewards = [s.reward.get(self._reward_key or "") if isinstance(s.reward, dict) else s.reward for s in samples]
        numbers = [float(reward) for reward in rewards if isinstance(reward, Real)]
        source = self._by_name.get(samples[0].metadata.get("source_name", "")) if samples else None
        if source is None or not numbers:
            return
        rules = self._curriculum or _CURRICULUM
        rate = sum(number >= rules["solved"] for number in numbers) / len(numbers)
        source.count("observed")
        source.count("pass_rate", rate)
        row = samples[0].metadata["source_row"]
        source.due.pop(row, None)
        if self._curriculum is not None and not rules["low"] < rate < rules["high"]:
            source.due[row] = int(source.position["epoch"] + 1 + rules["skip_epochs"])

    def take_metrics(self) -> dict[str, float]:
        """Return, of each data set: prompts taken and left out since the last call, and the mean pass rate."""
        metrics: dict[str, float] = {}
        for source in self._sources:
            counts, source.counts = source.counts, {}
            head = f"rollout/mixture/{source.name}"
            metrics |= {f"{head}/{name}": counts.get(name, 0) for name in ("prompts", "left_out")}
            metrics[f"{head}/waiting"] = sum(due > source.position["epoch"] for due in source.due.values())
            if counts.get("observed"):
                metrics[f"{head}/pass_rate"] = counts["pass_rate"] / counts["observed"]
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the place in every data set, by name."""
        return {
            source.name: {**source.position, "due": [[row, epoch] for row, epoch in sorted(source.due.items())]}
            for source in self._sources
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from ``state``; a data set that it does not know begins at its start."""
        for source in self._sources:
            position = dict((state or {}).get(source.name, {}))
            source.due = {int(row): int(epoch) for row, epoch in position.pop("due", [])}
            source.position |= position
            self._turn_to(source, int(source.position["epoch"]))
