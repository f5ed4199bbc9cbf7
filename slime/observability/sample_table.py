"""The samples of each rollout as a table of Weights & Biases."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from slime.observability.telemetry import Sink
from slime.utils.redaction import redacted_text

NUM_ROWS = 32
MAX_CHARS = 4000
"""Of a prompt or response, from its start."""
COLUMNS = ("group", "index", "prompt", "response", "label", "reward", "length", "status")


class SampleTable(Sink):
    """Keeps the first samples of a rollout until its metrics are logged, whose run the table goes to."""

    def __init__(self, args: Namespace, process: str, *, primary: bool) -> None:
        self._rows: list[list[Any]] = []

    def samples(self, kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "rollout":
            self._rows = [_row(sample) for sample in facts["samples"][:NUM_ROWS]]

    def log(self, metrics: Mapping[str, Any], step_key: str) -> None:
        if step_key != "rollout/step" or not self._rows:
            return
        import wandb

        rows, self._rows = self._rows, []
        if wandb.run is not None:  # --wandb-mode disabled
            wandb.run.log({"samples": wandb.Table(columns=list(COLUMNS), data=rows), step_key: metrics[step_key]})


def _row(sample: Any) -> list[Any]:
    prompt, response, label = (
        redacted_text(str(t))[:MAX_CHARS] for t in (sample.prompt, sample.response, sample.label)
    )
    told = (str(sample.reward), sample.response_length, sample.status.value)
    return [sample.group_index, sample.index, prompt, response, label, *told]
