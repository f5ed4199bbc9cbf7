"""One job of ``tests.e2e.algorithms``: a recipe of ``scripts/`` in a process group and a Ray cluster of its own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.observability.metrics_file import FILE_NAME, read_records
from tests.e2e.algorithm_results import RunResult, read_run
from tests.e2e.algorithm_variants import Variant

REPO = Path(__file__).resolve().parents[2]
GRACE_S = 40
"""Seconds from SIGTERM, on which the recipe stops its job and its cluster, to SIGKILL."""
LOG_BYTES = 64 * 1024
"""What stays of a job's log: its end."""
KEPT = {FILE_NAME, "run.json", "log.txt"}
"""What stays in the folder of a finished run; checkpoints and exports go."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all jobs have in common."""

    device: str
    out: Path
    warm_start: Path
    warm_start_digest: str
    eval_config: Path
    rollouts: int
    extra_flags: tuple[str, ...]
    timeout_s: float
    max_starts: int
    keeps_checkpoints: bool


class Run:
    """A variant with a seed; started as often as needed, and read from its folder when it is done already."""

    def __init__(self, recipe: Recipe, variant: Variant, seed: int) -> None:
        self.recipe, self.variant, self.seed = recipe, variant, seed
        self.name = f"{variant.name}-seed{seed}"
        self.folder = recipe.out / self.name
        self.gpus: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._tag = f"SLIME_TEST_JOB={uuid.uuid4().hex}"
        self._started = 0.0
        self._starts_here = 0
        self._is_stopped = False
        self._record: dict[str, Any] = {"fingerprint": self.fingerprint, "starts": 0, "seconds": 0.0, "failure": None}
        if self._record_path.exists():
            self._record = json.loads(self._record_path.read_text())
            if self._record["fingerprint"] != self.fingerprint:
                raise ValueError(
                    f"{self.folder} was made with other flags, another warm start or another number of rollouts; give "
                    "another --out, or remove it"
                )

    @property
    def _record_path(self) -> Path:
        return self.folder / "run.json"

    @property
    def is_done(self) -> bool:
        """Whether every rollout was done, by this command or an earlier one."""
        return self._record.get("is_done", False)

    @property
    def failure(self) -> str | None:
        """Why the last start ended early; None when it did not."""
        return self._record["failure"]

    @property
    def may_start(self) -> bool:
        """Whether this command may start it once more."""
        return not self.is_done and not self._is_stopped and self._starts_here < self.recipe.max_starts

    @property
    def flags(self) -> list[str]:
        """What is put behind the recipe's own flags."""
        recipe = self.recipe
        own = [flag.replace("{run}", str(self.folder)) for flag in self.variant.flags]
        # The warm start may have been made with another head dimension than that of the recipe's model.
        config = json.loads((recipe.warm_start / "task" / "hf" / "config.json").read_text())
        return [
            *("--kv-channels", str(config["head_dim"]), "--eval-config", str(recipe.eval_config)),
            *("--num-rollout", str(recipe.rollouts), "--eval-interval", "5", "--save-interval", "20"),
            *own,
            *recipe.extra_flags,
        ]

    @property
    def fingerprint(self) -> str:
        """Changes with everything that would make another curve."""
        paths = (str(self.folder), str(self.recipe.eval_config))
        flags = [flag for flag in self.flags if not any(path in flag for path in paths)]
        parts = [flags, dict(self.variant.files), self.variant.loop, self.seed, self.recipe.device]
        return hashlib.sha256(json.dumps([*parts, self.recipe.warm_start_digest]).encode()).hexdigest()[:16]

    def start(self, gpus: list[str]) -> None:
        """Start the recipe; ``gpus`` are those it sees, none on a CPU."""
        self._starts_here += 1
        self.gpus = gpus
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.variant.files.items():
            (self.folder / name).write_text(text)
        tag, value = self._tag.split("=")
        environment = dict(os.environ) | {
            tag: value,
            "TINY_DIR": str(self.recipe.warm_start),
            "SAVE_DIR": str(self.folder),
            "SEED": str(self.seed),
            "LOOP": self.variant.loop.value,
        }
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        # A cluster of the caller must not be shared: several jobs would wait for its GPUs.
        for name in ("SLIME_SCRIPT_EXTERNAL_RAY", "SLIME_RAY_STARTED", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            environment.pop(name, None)
        with open(self.folder / "log.txt", "ab") as log:
            self._process = subprocess.Popen(
                [str(REPO / "scripts" / f"run-tiny-{self.recipe.device}.sh"), *self.flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=REPO,
                start_new_session=True,
                # What a shell starts in its background inherits that Ctrl-C is ignored; the job must not.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self._started = time.monotonic()
        self._record["starts"] += 1
        self._write_record()

    def poll(self) -> bool:
        """Whether it has ended; a job whose time is up is stopped."""
        assert self._process is not None
        code = self._process.poll()
        if code is None and time.monotonic() - self._started > self.recipe.timeout_s:
            self.stop(f"not done after {self.recipe.timeout_s:.0f} s (--job-timeout-s)")
            return True
        if code is None:
            return False
        num_rollouts = self._rollouts_done()
        if code == 0 and num_rollouts >= self.recipe.rollouts:
            self._ended(None)
        else:
            self._ended(f"exit code {code} after {num_rollouts} of {self.recipe.rollouts} rollouts")
        return True

    def terminate(self) -> None:
        """Ask the recipe to end; :meth:`stop` waits for it."""
        assert self._process is not None
        self._process.terminate()

    def stop(self, why: str) -> None:
        """End the recipe, its job and its cluster, and whatever is left of them."""
        assert self._process is not None
        self.terminate()
        try:
            self._process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=GRACE_S)
        self._is_stopped = True
        self._ended(why)

    def _ended(self, failure: str | None) -> None:
        self._kill_leftovers()
        self._process = None
        self._record["seconds"] = round(self._record["seconds"] + time.monotonic() - self._started, 1)
        self._record |= {"failure": failure, "is_done": failure is None}
        self._write_record()
        log = self.folder / "log.txt"
        log.write_bytes(log.read_bytes()[-LOG_BYTES:])
        if failure is None and not self.recipe.keeps_checkpoints:
            for path in sorted(self.folder.rglob("*"), reverse=True):
                if path.relative_to(self.folder).parts[0] not in {*KEPT, *self.variant.files}:
                    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def _kill_leftovers(self) -> None:
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._tag.encode() in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:
                continue  # it ended by itself, or is another user's

    def _rollouts_done(self) -> int:
        path = self.folder / FILE_NAME
        records = read_records(path) if path.exists() else ()
        return int(max((record["rollout/step"] for record in records if "perf/time_step_s" in record), default=-1)) + 1

    def _write_record(self) -> None:
        self._record_path.write_text(json.dumps(self._record, indent=1) + "\n")

    def result(self) -> RunResult:
        """The numbers so far."""
        failure = None if self.is_done else self.failure or "was not started"
        return read_run(
            self.folder,
            variant=self.variant.name,
            title=self.variant.title,
            seed=self.seed,
            flags=list(self.variant.flags),
            why=self.variant.why,
            seconds=self._record["seconds"],
            starts=self._record["starts"],
            failure=failure,
        )
