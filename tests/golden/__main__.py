"""Run the five golden jobs and compare their numbers with recorded ones, bit for bit.

    python -m tests.golden                       compare with tests/golden/numbers.json
    python -m tests.golden --only grpo lora      two of the jobs
    python -m tests.golden --without-extensions  with a copy of the repository whose slime/ext is empty
    python -m tests.golden --write               record; the commit that does so says why the numbers differ

Bits depend on the processor and the packages.  On another machine, record with `--write --file before.json` at the
commit before the change, and compare with `--file before.json` after it.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.contracts.source_tree import copy_without_extensions
from tests.e2e.job import make_task
from tests.golden.jobs import JOBS, run

NUMBERS = Path(__file__).with_name("numbers.json")
PACKAGES = ("torch", "megatron-core", "sglang", "transformers")


def machine() -> dict[str, str]:
    """Return what the bits depend on apart from the code."""
    models = [
        line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model" in line
    ]
    return {"processor": " ".join([platform.machine(), *models[:2]]), **{name: version(name) for name in PACKAGES}}


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """Return a line for every number that differs, is missing or is new."""
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = sorted({*expected, *found})
        return [line for key in keys for line in differences(expected.get(key), found.get(key), f"{where}/{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for number, pair in pairs for line in differences(*pair, where=f"{where}[{number}]")]
    return [] if expected == found else [f"{where}: {expected!r} was recorded, {found!r} is computed"]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="NAME", help=", ".join(JOBS))
    parser.add_argument("--write", action="store_true", help="record the numbers instead of comparing them")
    parser.add_argument("--file", type=Path, default=NUMBERS, help="the recorded numbers")
    parser.add_argument("--without-extensions", action="store_true", help="in a copy whose slime/ext is empty")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the jobs")
    return parser.parse_args(argv)


def main() -> int:
    """Run the jobs; return 1 if a number differs."""
    options = parse()
    if options.without_extensions:
        words = [word for word in sys.argv[1:] if word != "--without-extensions"]
        with tempfile.TemporaryDirectory(prefix="core-") as folder:
            copy_without_extensions(Path(folder))
            return subprocess.run([sys.executable, "-m", "tests.golden", *words], cwd=folder, check=False).returncode
    recorded = json.loads(options.file.read_text()) if options.file.exists() else {"machine": machine(), "jobs": {}}
    if recorded["machine"] != machine():
        if not options.write:
            print(
                f"{options.file} was recorded on {recorded['machine']}; this machine is {machine()}", file=sys.stderr
            )
            return 2
        recorded = {"machine": machine(), "jobs": {}}
    base, lines = Path(tempfile.mkdtemp(prefix="golden-")), []
    make_task(base)
    for name in options.only:
        start = time.monotonic()
        found = run(name, base)
        new = differences(recorded["jobs"].get(name), found, name)
        recorded["jobs"][name] = found
        print(f"{name}: {len(new)} differences, {time.monotonic() - start:.0f} s", flush=True)
        lines += new
    if options.write:
        options.file.write_text(json.dumps(recorded, indent=1) + "\n")
    if options.keep or (lines and not options.write):
        print("\n".join([*lines[:40], f"folders: {base}"]))
    else:
        shutil.rmtree(base)
    return int(bool(lines) and not options.write)


if __name__ == "__main__":
    sys.exit(main())
