"""Data sources: one that builds on slime's, one from the abstract class up."""

import copy
import os

import torch

from slime.rollout.data_source import DataSource, RolloutDataSourceWithBuffer
from slime.utils.types import Sample


class TaggingSource(RolloutDataSourceWithBuffer):
    """slime's own source; every prompt is tagged with where it came from."""

    def __init__(self, args):
        super().__init__(args)
        self.handed_out = 0

    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.metadata.setdefault("source_name", "calculator")
        self.handed_out += len(groups)
        self.update_metadata({"handed_out": self.handed_out})
        return groups


class SumsSource(DataSource):
    """Makes its own prompts: the n-th prompt is n + (n + 1)."""

    def __init__(self, args):
        self.args = args
        self.next = 0
        self.index = 0
        self.buffer = []

    def get_samples(self, num_samples):
        groups = self.buffer[:num_samples]
        del self.buffer[:num_samples]
        while len(groups) < num_samples:
            sample = Sample(prompt=f"{self.next} + {self.next + 1} =", label=str(2 * self.next + 1))
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                member = copy.deepcopy(sample)
                member.group_index = self.next
                member.index = self.index
                self.index += 1
                group.append(member)
            self.next += 1
            groups.append(group)
        return groups

    def add_samples(self, samples):
        self.buffer.extend(samples)

    def path(self, rollout_id):
        return os.path.join(self.args.save, "rollout", f"sums_{rollout_id}.pt")

    def save(self, rollout_id):
        os.makedirs(os.path.dirname(self.path(rollout_id)), exist_ok=True)
        torch.save({"next": self.next, "index": self.index}, self.path(rollout_id))

    def load(self, rollout_id=None):
        if rollout_id is None or rollout_id < 0:
            return
        path = os.path.join(self.args.load, "rollout", f"sums_{rollout_id}.pt")
        if os.path.exists(path):
            state = torch.load(path)
            self.next, self.index = state["next"], state["index"]

    def __len__(self):
        return 1000
