"""Several data sets as one stream of prompts: ``--prompt-data mix.yaml``.

The next prompt comes from the data set that is furthest behind its weight; each data set has its own order and its own
epochs.  A prompt whose answers were all right, or all wrong, may be left out of the next epochs.  Which prompt comes
next depends on the file, the seed, and the state that checkpoints keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from typing import Any

from slime.ext.environments.flags import CURRICULUM, FLAG, read_mix
from slime.flags.reward import RewardConfig
from slime.rollout.base_types import leaf_samples
from slime.rollout.data_source import OpenDataset, RolloutDataSourceWithBuffer
from slime.rollout.prompt_dataset import Dataset, RowDigests
from slime.rollout.run_state import GroupObserver
from slime.utils.errors import DataError
from slime.utils.types import Sample


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
        open_dataset: OpenDataset,
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
        self._sources = [_MixedSet(one["name"], open_dataset(one), one["weight"]) for one in mix.sources]
        self._by_name = {source.name: source for source in self._sources}
        for source in self._sources:
            for row, sample in enumerate(source.dataset.origin_samples):
                sample.metadata |= {"source_name": source.name, "source_row": row}
            self._turn_to(source, 0)

    @property
    def digests(self) -> dict[str, RowDigests]:
        """What tells the data sets from others, by name; weights may change."""
        return {source.name: source.dataset.digests[""] for source in self._sources}

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
        rules = self._curriculum or CURRICULUM
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


class MixedDataSource(RolloutDataSourceWithBuffer):
    """The default data source, with prompts of a mixture."""

    def _open_dataset(self, open_one: OpenDataset) -> Mixture:
        key = RewardConfig.of(self.args).reward_key
        return Mixture(self.args.prompt_data, open_one, is_shuffled=self.args.rollout_shuffle, reward_key=key)

    def _next_rows(self, num_rows: int) -> list[Sample]:
        rows: list[Sample] = self.dataset.take(num_rows)
        return rows

    @property
    def observers(self) -> tuple[GroupObserver, ...]:
        """What wants to see the groups that become of these prompts."""
        return (self.dataset,)

    def state_dict(self) -> dict[str, Any]:
        """Return the present state, the places in the data sets included."""
        return super().state_dict() | {"mixture": self.dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; see the class that this one extends."""
        super().load_state_dict(state)
        self.dataset.load_state_dict(state.get("mixture"))
