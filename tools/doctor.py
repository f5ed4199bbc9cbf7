"""Check this machine before a job needs it: one line per check, good, bad or unknown, with the remedy.

    slime doctor [--save DIR] [--port 8265] [--hf-checkpoint DIR]

Each main package is compared with its pinned version, and each recipe of ``scripts/`` with what it needs.
Exits with 1 if a line is bad.  Writes one file to --save and removes it.  With --hf-checkpoint, it runs a job without
training steps: a trainer and an engine of that model on one GPU, and one push between them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from slime.ext.record.run_reader import Run, read_run
from slime.flags.kinds import port_number
from slime.utils import env
from slime.utils.errors import DataError
from slime.utils.net import format_host_port, is_loopback
from tools.installed import BAD, GOOD, UNKNOWN, table
from tools.terminal import say

REPO = Path(__file__).resolve().parents[1]
Verdict = tuple[str, str]
MIN_FILES, MIN_SHM_GIB, MIN_TMP_GIB, MIN_DISK_MBS = 16384, 8, 20, 200
PROBE_BYTES = 64 << 20
NVLINK_GBS = {"A100": 300, "A800": 200, "H100": 450, "H800": 200, "H200": 450, "H20": 450, "B200": 900}
"""GB/s of a card in one direction, which an all-reduce can approach."""
GOOD_SHARE = 0.4
"""Share of that bandwidth below which something is wrong."""
ALL_REDUCE_TIMEOUT_S, JOB_TIMEOUT_S, END_TIMEOUT_S = 120, 420, 60


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, default=Path("."), help="The folder that checkpoints will go to.")
    parser.add_argument("--port", type=port_number, default=8265, help="Of Ray's dashboard.")
    parser.add_argument("--hf-checkpoint", type=Path, help="Start an engine of this model, and push to it once.")
    options = parser.parse_args(argv)
    verdicts = []
    for name, check in checks(options.save, options.port).items():
        verdicts.append(_show(name, *_safely(check)))
    for verdict, name, text in table():
        verdicts.append(_show(name, verdict, text))
    for name, found in job_without_steps(options.hf_checkpoint).items():
        verdicts.append(_show(name, *found))
    raise SystemExit(1 if BAD in verdicts else 0)


def _show(name: str, verdict: str, text: str) -> str:
    say(f"{verdict:8} {name:18} {text}", flush=True)
    return verdict


def checks(save: Path, port: int) -> dict[str, Callable[[], Verdict]]:
    """Return the checks by name."""
    return {
        "GPUs": gpus,
        "links of GPUs": links,
        "all-reduce": all_reduce,
        "shared memory": lambda: space(Path("/dev/shm"), MIN_SHM_GIB, "give the container --shm-size, or --ipc=host"),
        "open files": open_files,
        "temporary files": lambda: space(Path(tempfile.gettempdir()), MIN_TMP_GIB, "free it, or set TMPDIR"),
        "disk of --save": lambda: disk(save),
        "clock": clock,
        "host name": host_name,
        "port of Ray": lambda: free_port(port),
        "what listens": listening,
    }


def _safely(check: Callable[[], Verdict]) -> Verdict:
    try:
        return check()
    except (OSError, subprocess.SubprocessError, ValueError, ImportError) as error:
        return UNKNOWN, f"it cannot be looked at: {type(error).__name__}: {error}"


def _ask(*words: str) -> str | None:
    """Return what a program prints; None if it does not exist or fails."""
    if shutil.which(words[0]) is None:
        return None
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return ended.stdout if ended.returncode == 0 else None


def gpus() -> Verdict:
    """Check number, memory and use of the GPUs."""
    listed = _ask(
        "nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits"
    )
    if listed is None:
        return UNKNOWN, "no nvidia-smi: jobs run on the CPU, slowly (scripts/run-tiny-cpu.sh), or install the driver"
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.strip()]
    used = [index for index, row in enumerate(rows) if float(row[2]) > 1024]
    text = f"{len(rows)} x {rows[0][0]}, {float(rows[0][1]) / 1024:.0f} GiB, driver {rows[0][3]}"
    return (BAD, f"{text}; GPUs {used} are in use: end the processes that nvidia-smi shows") if used else (GOOD, text)


def links() -> Verdict:
    """Check how the GPUs reach each other."""
    topology = _ask("nvidia-smi", "topo", "-m")
    if topology is None:
        return UNKNOWN, "no nvidia-smi"
    rows = re.findall(r"^GPU\d+\s+(.*)$", topology, re.M)
    if len(rows) < 2:
        return GOOD, "one GPU"
    if all(re.search(r"\bNV\d+\b", row) for row in rows):
        return GOOD, "NVLink between the GPUs"
    return UNKNOWN, "no NVLink between some GPUs: keep --tensor-model-parallel-size small"


def space(folder: Path, gib: float, remedy: str) -> Verdict:
    """Check the free space in a folder."""
    free = shutil.disk_usage(folder).free / 2**30
    text = f"{free:.1f} GiB free in {folder}"
    return (GOOD, text) if free >= gib else (BAD, f"{text}, {gib} wanted: {remedy}")


def open_files() -> Verdict:
    """Check the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= MIN_FILES or soft == resource.RLIM_INFINITY:
        return GOOD, f"{soft} allowed"
    can_be_raised = hard == resource.RLIM_INFINITY or hard >= MIN_FILES
    remedy = f"ulimit -n {MIN_FILES}" if can_be_raised else "raise nofile in /etc/security/limits.conf"
    return BAD, f"{soft} allowed, {MIN_FILES} wanted: {remedy}"


def disk(folder: Path) -> Verdict:
    """Write 64 MiB and measure the speed."""
    while not folder.exists():
        folder = folder.absolute().parent
    data, start = os.urandom(PROBE_BYTES), time.monotonic()
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        speed = PROBE_BYTES / 1e6 / max(1e-6, time.monotonic() - start)
    text = f"{speed:.0f} MB/s into {folder}"
    return (
        (GOOD, text)
        if speed >= MIN_DISK_MBS
        else (BAD, f"{text}, {MIN_DISK_MBS} wanted: a faster disk, or --async-save")
    )


def clock() -> Verdict:
    """Ask the kernel whether the clock is synchronized."""
    said = _ask("timedatectl", "show", "--property=NTPSynchronized", "--value")
    if said is None:
        return UNKNOWN, "timedatectl does not say; on several nodes the clocks must agree within a second"
    return (GOOD, "kept in time") if said.strip() == "yes" else (UNKNOWN, "not kept in time: start an NTP client")


def host_name() -> Verdict:
    """Look up this machine's own name, by which a job's processes find each other."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return BAD, f"{name} has no address: add it to /etc/hosts, or set SLIME_HOST_IP"
    return GOOD, f"{name} is {address}"


def free_port(port: int) -> Verdict:
    """Check that the port of Ray's dashboard is free."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return UNKNOWN, f"{port} is taken: a Ray cluster runs, or ray start --dashboard-port OTHER"
    return GOOD, f"{port} is free"


def listening() -> Verdict:
    """List where jobs on this machine listen beyond loopback (docs/security.md says what protects each)."""
    sockets: dict[str, list[str]] = {"loopback": [], "the network": []}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        program = next((Path(word).name for word in words if re.search(r"ray|slime|sglang|train\w*\.py", word)), None)
        with contextlib.suppress(psutil.Error):  # the process has ended, or belongs to another user
            for each in process.net_connections("tcp") if program is not None else ():
                if each.status == psutil.CONN_LISTEN:
                    side = "loopback" if is_loopback(each.laddr.ip.removeprefix("::ffff:")) else "the network"
                    sockets[side].append(f"{format_host_port(*each.laddr)} ({program})")
    beyond = sorted(set(sockets["the network"]))
    if beyond:
        return UNKNOWN, f"{', '.join(beyond)}: keep strangers out of that network (docs/security.md)"
    return GOOD, f"{len(sockets['loopback'])} sockets of jobs, all on loopback"


def all_reduce() -> Verdict:
    """Measure all-reduce over the GPUs and compare it with the bandwidth of their links."""
    program = [sys.executable, str(REPO / "tools" / "all_reduce.py")]
    try:
        ended = subprocess.run(program, capture_output=True, text=True, timeout=ALL_REDUCE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return BAD, f"no end within {ALL_REDUCE_TIMEOUT_S} s: NCCL_DEBUG=INFO python tools/all_reduce.py says where"
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        return BAD, f"{last[:200]}: NCCL_DEBUG=INFO python tools/all_reduce.py says more"
    return judged_all_reduce(json.loads(ended.stdout.splitlines()[-1]), _ask("nvidia-smi", "-L") or "", links()[1])


def judged_all_reduce(measured: dict[str, Any], cards: str, linked: str) -> Verdict:
    """Return the verdict on a measured bandwidth.

    Args:
        measured: what ``tools/all_reduce.py`` prints.
        cards: the list of the machine's cards.
        linked: how the cards are connected.
    """
    text = f"{measured['gb_per_s']} GB/s over {measured['ranks']} ranks with {measured['backend']}"
    if measured["backend"] == "gloo":
        return UNKNOWN, f"{text}, between processes of this host: there are no two GPUs to measure"
    link = next((speed for name, speed in NVLINK_GBS.items() if re.search(rf"\b{name}\b", cards)), None)
    if link is None or not linked.startswith("NVLink"):
        return UNKNOWN, f"{text}; without NVLink keep parallel groups small"
    text += f", the links give {link}"
    if measured["gb_per_s"] >= GOOD_SHARE * link:
        return GOOD, text
    return BAD, f"{text}: look at nvidia-smi nvlink --status, NCCL_P2P_DISABLE, and NCCL_DEBUG=INFO"


def job_without_steps(model: Path | None) -> dict[str, Verdict]:
    """Start a trainer and an engine of a model as a real job, push once, and say how long each took."""
    if model is None:
        return dict.fromkeys(("engine's start", "push"), (UNKNOWN, "not tried: give --hf-checkpoint DIR"))
    with tempfile.TemporaryDirectory(prefix="slime-doctor-") as folder:
        place = str(model.absolute())
        words = """--num-rollout 0 --actor-num-nodes 1 --actor-num-gpus-per-node 1 --colocate
            --rollout-num-gpus-per-engine 1 --rollout-batch-size 1 --n-samples-per-prompt 2 --global-batch-size 2
            --disable-rollout-global-dataset --rm-type random --check-weight-update-equal"""
        with open(Path(folder, "log.txt"), "w+", encoding="utf-8") as log:
            job = subprocess.Popen(
                [
                    *(sys.executable, "train.py", "--hf-checkpoint", place, "--ref-load", place, "--save", folder),
                    *words.split(),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPO,
                env={**env.copy(), "PYTHONPATH": str(REPO), "RAY_ADDRESS": "local"},
                start_new_session=True,
            )
            try:
                code: int | None = job.wait(timeout=JOB_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        job.wait(timeout=END_TIMEOUT_S)
                    with contextlib.suppress(ProcessLookupError):  # all of its processes have ended
                        os.killpg(job.pid, signal.SIGKILL)
                    job.wait(timeout=END_TIMEOUT_S)
            log.seek(0)
            return judged_job(Path(folder), code, log.read())


def judged_job(folder: Path, code: int | None, log: str) -> dict[str, Verdict]:
    """Return what the record of a job without steps says about an engine's start and a push."""
    try:
        run = read_run(folder)
    except DataError:
        run = Run(folder)
    began = run.config.get("time", 0.0)
    serving = [one["time"] for one in run.events if one["event"] == "engine" and one["state"] == "serving"]
    pushed = [one["seconds"] for one in run.events if one["event"] == "push"]
    errors = [one["text"] for one in run.events if one["event"] == "error"]
    ended = f"no end within {JOB_TIMEOUT_S} s" if code is None else f"exit code {code}"
    lines = [line for line in log.splitlines() if line.strip("- ")]
    why = (errors or [line for line in lines if "Error: " in line] or lines or [ended])[-1][:300]
    failed = BAD, f"{why}: run train.py with --num-rollout 0 and read its log"
    found = {
        "engine's start": (GOOD, f"serves after {serving[0] - began:.0f} s") if serving else failed,
        "push": (GOOD, f"the first took {pushed[0]:.1f} s, all digests equal") if pushed and code == 0 else failed,
    }
    return found


if __name__ == "__main__":
    main()
