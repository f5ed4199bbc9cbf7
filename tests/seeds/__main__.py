"""Run miniature versions of the recipes in the project's documents as whole jobs, one seed after the other.

    python -m tests.seeds                                    all, on a CPU (DEVICE=cpu of `make seeds`)
    python -m tests.seeds --device gpu --parallel 2          on GPUs of one host, two seeds at a time
    python -m tests.seeds --only deepseek-r1 --keep          one seed, keeping its folder
    python -m tests.seeds --device gpu --only minimax-m2     a recipe beyond the documents

Each seed creates a small random model of the family, converts it, runs the recipe's script unmodified with the flags
of a small machine added, and runs it again from its checkpoint in another parallel layout.  Prints a table.  Exit code
1 if a job failed or did not show what its recipe is for.  Folders of failed seeds stay in --work-dir.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import torch

from benchmarks import results_page
from tests.seeds import jobs, outcome
from tests.seeds.others import OTHERS
from tests.seeds.outcome import Outcome
from tests.seeds.recipes import ONE_GPU, SEEDS, Form, Job, Seed

ALL = {**SEEDS, **OTHERS}
COLUMNS = (
    *("seed", "layout of trainer; engine", "from", "steps", "abs(dlogp), largest", "pushes compared", "eval"),
    *("drafts accepted", "groups dropped, answers carried on", "s", "result"),
)


@dataclass
class Row:
    """One job of a seed, and its result."""

    seed: str
    layout: str
    goes_on: bool = False
    outcome: Outcome = field(default_factory=Outcome)
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    skipped: str = ""

    def cells(self) -> list[str]:
        of = self.outcome
        result = self.skipped or ("**FAIL**: " + "; ".join(self.problems) if self.problems else "ok")
        return [
            self.seed,
            self.layout,
            "its checkpoint" if self.goes_on else "reference",
            str(len(of.steps)),
            f"{max(of.steps):.1e}" if of.steps else "-",
            str(of.num_pushes),
            ", ".join(f"{value:.2f}" for value in of.eval) or "-",
            ", ".join(f"{value:.2f}" for value in of.acceptance) or "-",
            f"{of.dropped}, {of.partial}",
            f"{self.seconds:.0f}",
            result.replace("|", "/"),
        ]


def run_seed(seed: Seed, form: Form, base: Path, options: argparse.Namespace) -> list[Row]:
    """Run all jobs of a seed; after a failure, skip jobs that continue from the failed one."""
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    start = time.monotonic()
    try:
        jobs.prepare(seed, form, base, dtype, options.num_gpus)
    except (jobs.CommandFailed, OSError, ValueError) as error:
        return [Row(seed.title, "preparation", seconds=time.monotonic() - start, problems=[str(error)])]
    rows: list[Row] = []
    save, first = base, 0
    for number, job in enumerate(form.jobs[: options.jobs]):
        if not job.goes_on:
            save, first = base / f"run{number}", 0
        if job.num_gpus > options.num_gpus:
            job = replace(job, layout=f"1 GPU instead of {job.layout}", flags=f"{job.flags} {ONE_GPU}", num_gpus=1)
        row = Row(seed.title, job.layout, job.goes_on)
        rows.append(row)
        if job.goes_on and (rows[-2].problems or rows[-2].skipped):
            row.skipped = "not run: the job before it did not end well"
        else:
            _run_job(row, seed, form, job, base, save, first, options.limit_s)
            first += job.num_rollouts
            print(" | ".join(row.cells()), flush=True)
    return rows


def _run_job(row: Row, seed: Seed, form: Form, job: Job, base: Path, save: Path, first: int, limit_s: float) -> None:
    num_records, start = outcome.count_records(save), time.monotonic()
    try:
        log = jobs.run_job(seed, form, job, base, save, first + job.num_rollouts, limit_s)
        row.outcome = outcome.read(save, log, num_records, first)
        row.problems = outcome.problems(job, row.outcome, first)
    except jobs.CommandFailed as error:
        row.problems = [str(error)]
    row.seconds = time.monotonic() - start


def try_seed(name: str, options: argparse.Namespace) -> list[Row]:
    """Run a seed, catching failures; its folder is removed if all went well."""
    seed, base = ALL[name], options.work_dir / options.device / name
    form = getattr(seed, options.device)
    try:
        rows = run_seed(seed, form, base, options)
    except Exception as error:  # noqa: BLE001 - the other seeds are not concerned
        traceback.print_exc()
        rows = [Row(seed.title, "-", problems=[f"{type(error).__name__}: {error}"])]
    if not any(row.problems for row in rows) and not options.keep:
        shutil.rmtree(base)
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def about(device: str) -> str:
    """Return a description of what ran."""
    how = "trainers over gloo, SGLang's server, fp32" if device == "cpu" else "bf16"
    return (
        "Each recipe's script unmodified, with flags behind its own: a random model of its family, checkpoints made "
        f"by the commands of its document, drawn rewards; {how}."
    )


def left_out(names: Sequence[str], device: str) -> dict[str, str]:
    """Return title -> the parts of the recipe that this machine skips, or an empty string."""
    forms = {ALL[name].title: getattr(ALL[name], device) for name in names}
    return {title: f"on GPUs only: {form.gpu_only}" if form.gpu_only else "" for title, form in forms.items()}


def write_docs(device: str, rows: str, names: Sequence[str], folder: Path = results_page.FOLDER) -> None:
    """Record the table of a run, with a note for each recipe; the first run creates the file.

    Rows of recipes that did not run stay, because the file also has recipes that only --only runs.
    """
    name, where = f"seeds_{device}", {"cpu": "on a CPU", "gpu": "on GPUs"}[device]
    if not (folder / f"{name}.json").exists():
        title = f"The recipes of the documents in miniature, {where}"
        head = {"title": title, "group": "Whole jobs", "command": f"make seeds DEVICE={device}", "notes": []}
        results_page.save(name, {**head, "tables": []}, folder)
        results_page.record(name, f"{about(device)}\n", folder)
    results_page.record(name, rows, folder, part=left_out(names, device), words=1)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.seeds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(SEEDS), metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--jobs", type=int, help="only so many jobs of each seed, from the first")
    parser.add_argument("--parallel", type=int, default=1, help="seeds side by side, each in a Ray of its own")
    parser.add_argument("--limit-s", type=float, default=900, help="seconds that one job may take")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--keep", action="store_true", help="keep all folders, not only those of failed seeds")
    parser.add_argument("--write-docs", action="store_true", help="record the table in benchmarks/results")
    options = parser.parse_args(argv)
    if (options.device == "gpu") != torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees {torch.cuda.device_count()} GPUs here")
    if without := [name for name in options.only if getattr(ALL[name], options.device) is None]:
        parser.error(f"--only {' '.join(without)}: only --device gpu can run it")
    options.work_dir = options.work_dir.resolve()
    # A CPU's GPUs are logical, and there are always enough.
    options.num_gpus = torch.cuda.device_count() if options.device == "gpu" else 99
    return options


def stop(signum: int, frame: FrameType | None) -> None:
    """End every command, and then this process with the threads that wait for them."""
    for process in list(jobs.RUNNING):
        jobs.stop(process)
    os._exit(128 + signum)


def main() -> int:
    """Run the seeds; return 1 if one of them failed."""
    options = parse()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with ThreadPoolExecutor(options.parallel) as pool:
        rows = [row for rows in pool.map(lambda name: try_seed(name, options), options.only) for row in rows]
    lines = [f"{title}: {what}." for title, what in left_out(options.only, options.device).items() if what]
    print("\n" + "\n\n".join([about(options.device), *lines, table(rows)]) + "\n")
    if options.write_docs:
        write_docs(options.device, table(rows), options.only)
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main())
