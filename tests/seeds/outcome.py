"""Reads the results of a job from its record and log, and checks them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime.observability.metrics_file import FILE_NAME, evaluations, read_records
from tests.seeds.recipes import Job

DIFFERENCE = "train/train_rollout_logprob_abs_diff"
PUSHED = re.compile(r"Pushed weight version")
RESUMED = "latest_checkpointed_iteration.txt"


@dataclass
class Outcome:
    """Results of one job."""

    steps: list[float] = field(default_factory=list)
    """Mean log-prob difference of each optimizer step."""
    num_pushes: int = 0
    """Pushes.  Each is compared by ``--check-weight-update-equal`` unless it is a plain push; a difference ends the
    job."""
    eval: list[float] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)
    """Share of accepted draft tokens, for each rollout."""
    dropped: int = 0
    """Groups that the filter dropped."""
    partial: int = 0
    """Samples begun in an earlier rollout."""
    mtp: list[float] = field(default_factory=list)
    """Loss of the MTP layer in each step."""
    rollouts: list[int] = field(default_factory=list)
    saved: int = -1


SIGNS: dict[str, tuple[str, Callable[[Outcome], bool]]] = {
    "eval": ("no evaluation is in the record", lambda outcome: bool(outcome.eval)),
    "drafts": ("no drafted token was accepted", lambda outcome: sum(outcome.acceptance) > 0),
    "filter": ("the filter dropped no group", lambda outcome: outcome.dropped > 0),
    "partial": ("no answer was carried into the next rollout", lambda outcome: outcome.partial > 0),
    "mtp": ("no loss of the MTP layer is in the record", lambda outcome: bool(outcome.mtp)),
}
"""What a job may have to show -> the message if it does not, and the test."""


def count_records(save: Path) -> int:
    path = save / FILE_NAME
    return sum(1 for _ in read_records(path)) if path.exists() else 0


def read(save: Path, log: Path, first_record: int, first_rollout: int) -> Outcome:
    """Return the results of the job that wrote the records from ``first_record`` on."""
    outcome = Outcome()
    for record in list(read_records(save / FILE_NAME))[first_record:]:
        _add(outcome, record)
    outcome.num_pushes = len(PUSHED.findall(log.read_text(errors="replace")))
    outcome.saved = int((save / RESUMED).read_text())
    for path in sorted((save / "dump").glob("[0-9]*.pt")):
        if int(path.stem) > first_rollout:
            samples = torch.load(path, weights_only=False)["samples"]
            begun = [(sample["metadata"] or {}).get("start_rollout_id", int(path.stem)) for sample in samples]
            outcome.partial += sum(rollout < int(path.stem) for rollout in begun)
    return outcome


def _add(outcome: Outcome, record: dict[str, Any]) -> None:
    outcome.eval += evaluations(record).values()
    for key, value in record.items():
        if key == DIFFERENCE:
            outcome.steps.append(value)
        elif key == "rollout/spec_accept_rate":
            outcome.acceptance.append(value)
        elif key == "rollout/groups/dropped":
            outcome.dropped += int(value)
        elif key == "train/mtp_loss":
            outcome.mtp.append(value)


def problems(job: Job, outcome: Outcome, first_rollout: int) -> list[str]:
    """Return the problems of a job's outcome, in words."""
    last = first_rollout + job.num_rollouts - 1
    found = [text for name, (text, holds) in SIGNS.items() if name in job.shows and not holds(outcome)]
    if len(outcome.steps) < job.num_rollouts:
        found.append(f"{len(outcome.steps)} optimizer steps of {job.num_rollouts} rollouts")
    if wrong := [value for value in outcome.steps if not value <= job.bound]:
        found.append(f"abs(dlogp) {max(wrong):.2g} is above {job.bound:g}")
    if outcome.num_pushes < job.num_rollouts:
        found.append(f"{outcome.num_pushes} pushes of {job.num_rollouts} rollouts")
    if outcome.saved != last:
        found.append(f"the last checkpoint is of rollout {outcome.saved}, not {last}")
    return found
