"""The record of a run in its folder (``docs/record.md``), unless ``--no-record`` is given.

    config.json      the last start: command, every resolved value and its origin, versions, commit, hardware
    events.jsonl     starts, ends, deaths, pushes, saves, warnings, alarms: {"time", "event", "process", ...}
    spans.json       phases of every process, in Perfetto's trace format: an array, one span a line, never closed
    samples/         the samples of each rollout and evaluation (``sample_record``)

The driver begins the record; a process joins it when ``config.json`` is there.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from slime.ext.record.flags import RecordConfig
from slime.ext.record.job_state import Ask
from slime.ext.record.use_sampler import UseSampler
from slime.ext.record.writer import RecordWriter
from slime.flags.observability import TrackingConfig
from slime.observability import telemetry
from slime.observability.metric_utils import compute_rollout_step
from slime.observability.metrics_file import plain, run_folder
from slime.observability.telemetry import Sink
from slime.utils import env
from slime.utils.files import replace_file
from slime.utils.redaction import redacted, redacted_words

if TYPE_CHECKING:
    from slime.utils.types import Sample

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
PACKAGES = ("torch", "megatron-core", "sglang", "ray", "transformers", "numpy", "pyarrow", "slime-posttrain")
ENVIRONMENT = re.compile(r"(SLIME|NCCL|CUDA|SGLANG|OMP|TORCH|PYTORCH|NVTE|HF_HUB)_")
STEP_SPANS = ("step", "train")
"""Of the driver, and of a trainer's rank: at their end the use of GPUs and engines is logged."""
SAME_WARNINGS = 5
"""Times that one warning is recorded in a process."""


class RecordSink(Sink):
    """The record of this process; idle where the driver has not begun one.

    Args:
        args: the run's arguments, complete or not.
        process: its name, such as ``actor 0``.
        primary: the driver, which begins the record and describes the run.
    """

    wants = ("details",)

    def __init__(self, args: Namespace, process: str, *, primary: bool) -> None:
        self.config, self._args = RecordConfig.of(args), args
        self.writer: RecordWriter | None = None
        self._use: UseSampler | None = None
        self._is_primary = primary
        self._dropped: list[tuple[Sample, str]] = []
        """By filters since the last rollout."""
        folder = run_folder(TrackingConfig.of(args))
        if folder is None or not (primary or (folder / CONFIG_FILE).exists()):
            return
        try:
            if primary:
                folder.mkdir(parents=True, exist_ok=True)
                _write_config(args, folder)
        except OSError as error:
            logger.error("This run is not recorded: %s", error)
            return
        self.writer = RecordWriter(folder, process)
        self._use = UseSampler(args) if primary else None
        self._handler = _Warnings(self)
        logging.getLogger("slime").addHandler(self._handler)

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        if self.writer is not None:
            self.writer.event(name, fields)

    def begin(self, name: str, fields: Mapping[str, Any]) -> None:
        if self.writer is not None and self._use is None and name == "train":
            # Other processes have no step at whose end it would be logged.
            self._use = UseSampler(self._args, host=platform.node())

    def span(self, name: str, began: float, ended: float, fields: Mapping[str, Any]) -> None:
        if self.writer is not None:
            self.writer.add_span(name, began, ended, fields)
            if self._use is None or name not in STEP_SPANS or "rollout" not in fields:
                return
            if metrics := self._use.metrics():
                step = compute_rollout_step(self._args, fields["rollout"])
                telemetry.log({**metrics, "rollout/step": step}, "rollout/step")

    def offer(self, ask: Ask) -> None:
        if self._use is not None:
            self._use.offer(ask)

    def samples(self, kind: str, facts: Mapping[str, Any]) -> None:
        if self.writer is None:
            return
        from slime.ext.record import sample_record  # with pyarrow; a driver has no samples

        if kind == "dropped":
            self._dropped += [(sample, facts["reason"] or "dropped") for sample in facts["samples"]]
        elif kind == "rollout":
            dropped = self._dropped[:]
            del self._dropped[: len(dropped)]  # the event loop may have added some meanwhile
            sample_record.record_rollout(self.writer, self.config, dropped=dropped, **facts)
        elif kind == "evaluation":
            sample_record.record_evaluation(self.writer, self.config, **facts)
        else:
            sample_record.record_trained(self.writer, self.config, **facts)

    def flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            if self._use is not None:
                self._use.close()
            logging.getLogger("slime").removeHandler(self._handler)
            self.writer.close()  # its thread still records what its files cost
            if self._is_primary:
                folder = str(self.writer.folder).encode(errors="backslashreplace").decode()  # may be no UTF-8
                logger.info("The record of this run is %s; `slime report %s` makes a page of it.", folder, folder)
            self.writer = None


class _Warnings(logging.Handler):
    """Makes events of warnings and errors, a few of each kind."""

    def __init__(self, sink: RecordSink) -> None:
        super().__init__(logging.WARNING)
        self._sink = sink
        self._counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Record one line of the log."""
        self._counts[str(record.msg)] += 1
        if self._counts[str(record.msg)] <= SAME_WARNINGS and not record.name.startswith(__package__):
            facts = {"level": record.levelname.lower(), "where": record.name, "text": record.getMessage()[:2000]}
            self._sink.event("warning", facts)


# The description of the run


def _write_config(args: Namespace, folder: Path) -> None:
    shown = vars(redacted(args))
    shown.pop("value_origins", None)
    origins = vars(args).get("value_origins", {})  # the names of settings, those of secrets too
    values = {
        name: {"value": _shown(value), "origin": origins.get(name, "default")} for name, value in sorted(shown.items())
    }
    variables = {name: value for name, value in env.copy().items() if ENVIRONMENT.match(name)}
    content = {
        "format_version": FORMAT_VERSION,
        "run_id": shown.get("wandb_run_id"),
        "time": round(time.time(), 3),
        "command": redacted_words(sys.argv),
        "folder": str(Path.cwd()),
        "values": values,
        "environment": redacted(variables),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "git": _git(),
        "hardware": _hardware(),
        "process": own_process(),
    }
    # A path that is no UTF-8 has half surrogate pairs, of which this makes JSON's own escapes.
    text = json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace")
    replace_file(folder / CONFIG_FILE, lambda file: file.write(text), to_disk=False)


def _shown(value: Any) -> Any:
    """Return ``value`` as JSON has it; what is no plain value becomes text."""
    if isinstance(value, Namespace):
        return {name: _shown(one) for name, one in vars(value).items()}
    return plain(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any]:
    """Return commit and changed files of the checkout that slime runs from; empty outside of one."""
    git, root = shutil.which("git"), Path(__file__).resolve().parents[3]
    if git is None or not (root / ".git").exists():
        return {}

    def ask(*words: str) -> str:
        return subprocess.run(
            [git, "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "changed": ask("status", "--porcelain", "-uno").splitlines()[:100]}
    except (OSError, subprocess.SubprocessError):
        return {}


def own_process() -> dict[str, Any]:
    """Return what identifies this process: its machine (boot and PID namespace), its PID, and when it started."""
    return {"machine": _machine(), "pid": os.getpid(), "started": _start_of(os.getpid())}


def is_alive(process: Mapping[str, Any]) -> bool | None:
    """Return whether the process that ``own_process`` described runs; None if it belongs to another machine."""
    if process.get("machine") != _machine():
        return None
    return _start_of(process["pid"]) == process["started"]


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _start_of(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def _hardware() -> dict[str, Any]:
    """Return what the driver's machine is."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpus": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }
