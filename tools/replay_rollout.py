"""Repeat a rollout: send its recorded prompts to real engines with the weights of the checkpoint before it.

This is ``tools/replay.py RUN --step K --rollout``.  With ``--sglang-enable-deterministic-inference``, an engine draws
the same tokens again for every answer that was drawn by a single version of the weights.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from itertools import groupby
from pathlib import Path

from slime.ext.record.run_reader import read_run
from slime.observability.dumps import load_rollout_dump, save_rollout_dump
from slime.rollout.data_source import DataSource
from slime.utils.errors import DataError
from slime.utils.types import Sample
from tools.replay_plan import SCRIPT, Replay, recorded_samples, rollout_flags_of
from tools.terminal import say

FILE = "prompts.pt"
"""Name of the prompts' file in the replay's folder."""


class RecordedGroups(DataSource):
    """The groups of one recorded rollout, not yet answered, for ``--data-source-path``."""

    def __init__(self, args: Namespace) -> None:
        samples = load_rollout_dump(str(Path(args.save, FILE)), 0)
        self._groups = [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups.

        Raises:
            DataError: none are left; a group was given up.
        """
        if len(self._groups) < num_samples:
            raise DataError(f"the recorded rollout has {len(self._groups)} groups left, {num_samples} are asked for")
        taken, self._groups = self._groups[:num_samples], self._groups[num_samples:]
        return taken

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back."""
        self._groups = samples + self._groups

    def save(self, rollout_id: int) -> None:
        """Store nothing: the record has everything."""

    def load(self, rollout_id: int | None = None) -> None:
        """Restore nothing."""

    def __len__(self) -> int:
        return len(self._groups)


def unanswered(sample: Sample) -> Sample:
    """Return a sample as it was before its answer."""
    return Sample(
        group_index=sample.group_index, index=sample.index, prompt=sample.prompt, label=sample.label,
        metadata={name: value for name, value in sample.metadata.items() if name != "raw_reward"},
    )  # fmt: skip


def replay_rollout(replay: Replay) -> int:
    """Generate the rollout again through a real job without a training step; return the exit code.

    Raises:
        DataError: the checkpoint just before the step no longer exists.
    """
    if replay.begin != replay.rollout_id - 1:
        raise DataError(
            f"the rollout of step {replay.rollout_id + 1} needs the weights that drew it, the checkpoint after step "
            f"{replay.rollout_id}, which is gone; the nearest one before is after step {replay.begin + 1}."
        )
    if not replay.run.value("sglang_enable_deterministic_inference", False):
        say("The run had no --sglang-enable-deterministic-inference: its engines drew by chance.", flush=True)
    samples = recorded_samples(replay.run, replay.rollout_id)
    save_rollout_dump(str(replay.folder / FILE), 0, [unanswered(sample) for sample in samples])
    sys.argv = [SCRIPT, *rollout_flags_of(replay)]
    from slime.compose import parse_args, start_job
    from slime.ray.job import run

    def generate(args: Namespace) -> None:
        job = start_job(args)
        job.generate(replay.rollout_id)
        job.finish()

    try:
        run(generate, parse=parse_args)
    except SystemExit as ended:
        if ended.code:
            raise
    return _compare(replay, samples)


def _compare(replay: Replay, samples: list[Sample]) -> int:
    """Print how many answers are equal, and the first that differs."""
    again = {sample.index: sample for sample in recorded_samples(read_run(replay.folder), replay.rollout_id)}
    others = [sample for sample in samples if again[sample.index].tokens != sample.tokens]
    mixed = sum(len(set(sample.weight_versions)) > 1 for sample in samples)
    say(f"{len(samples) - len(others)} of {len(samples)} answers have the same tokens.")
    if mixed:
        say(f"{mixed} answers were drawn by weights of several versions, and cannot be drawn again.")
    if others:
        sample = others[0]
        pairs = zip(sample.tokens, again[sample.index].tokens, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), len(again[sample.index].tokens))
        place -= len(sample.tokens) - sample.response_length
        say(f"The first that differs is sample {sample.index}, from token {place} of its response on.")
    return 1 if others else 0
