"""List the runs below folders, the latest first: name, start, steps, last reward, state.

    slime runs [FOLDER ...]        default: runs/

A run is a folder with metrics.jsonl: its --save, else runs/ and its id.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.ext.record.run_reader import Run, read_run
from slime.observability.metrics_file import FILE_NAME, read_records
from slime.utils.errors import ConfigError
from tools.cli import clean_exit
from tools.terminal import say

COLUMNS = ("began", "steps", "reward", "state", "run")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="slime runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="*", default=[Path("runs")], metavar="FOLDER")
    options = parser.parse_args(argv)
    with clean_exit():
        rows = sorted((row_of(folder) for top in options.folders for folder in run_folders(top)), reverse=True)
        if not rows:
            where = ", ".join(map(str, options.folders))
            raise ConfigError(f"No run lies below {where}: no folder has a {FILE_NAME}. Name another folder.")
    widths = [max(len(row[at]) for row in (COLUMNS, *rows)) for at in range(len(COLUMNS))]
    for row in (COLUMNS, *rows):
        say("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def run_folders(top: Path) -> Iterator[Path]:
    """Yield the folders of runs below ``top``; nothing lies in a run but its own files."""
    for folder, names, files in os.walk(top):
        if FILE_NAME in files:
            names.clear()
            yield Path(folder)


def row_of(folder: Path) -> tuple[str, ...]:
    """Return the texts of ``COLUMNS`` for the run in ``folder``."""
    run = read_run(folder, with_spans=False)
    first = next(read_records(folder / FILE_NAME), {})
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(first["time"])) if "time" in first else "unknown"
    reward = _last_reward(run)
    steps = f"{len(run.rollouts)}/{'?' if run.num_rollout is None else run.num_rollout}"
    return began, steps, "" if reward is None else f"{reward:.3f}", run.state, str(folder)


def _last_reward(run: Run) -> float | None:
    rewards = [one.get("rollout/raw_reward") for _, one in sorted(run.rollouts.items())]
    numbers = [one for one in rewards if isinstance(one, int | float)]
    return numbers[-1] if numbers else None


if __name__ == "__main__":
    main()
