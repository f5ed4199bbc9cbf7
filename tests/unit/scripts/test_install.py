"""``make install`` and ``make browser``: what a machine gets, and what happens to an existing environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.contracts.source_tree import REPO

GPU = "echo 'GPU 0: NVIDIA H100 80GB HBM3'"
NO_GPU = "echo 'NVIDIA-SMI has failed'; exit 9"
PYTHON = """
echo "$(basename "$0") $*" >>"{record}"
case "$*" in
    --version) echo Python 3.11.9 ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/uv" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout's scripts and pins, with programs in bin/ that only record their arguments."""
    for name in ("scripts", "requirements"):
        shutil.copytree(REPO / name, tmp_path / name)
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    program(tmp_path, "nvidia-smi", NO_GPU)
    program(tmp_path, "df", "printf 'Filesystem\\nx 1 1 90000000 1%% /\\n'")
    program(tmp_path, "python", PYTHON.format(record=tmp_path / "record"))
    return tmp_path


def program(checkout: Path, name: str, text: str) -> None:
    (checkout / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
    (checkout / "bin" / name).chmod(0o755)


def run(checkout: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the checkout with its programs first on PATH."""
    environment = {name: value for name, value in os.environ.items() if name not in ("DEVICE", "SLIME_TORCH_INDEX")}
    environment |= {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "PYTHON": str(checkout / "bin/python")}
    return subprocess.run(
        words, cwd=checkout, env=environment | variables, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("smi", "files", "found"),
    [
        (GPU, [], "gpu"),
        (NO_GPU, [], "cpu"),
        ("echo 'No devices found.'", [], "cpu"),
        (NO_GPU, ["proc/driver/nvidia/gpus/0000:05:00.0/information"], "gpu"),
        (NO_GPU, ["dev/nvidia0"], "gpu"),
        (NO_GPU, ["dev/nvidiactl", "proc/driver/nvidia/version"], "cpu"),
    ],
)
def test_a_gpu_is_seen_by_its_driver(checkout, smi, files, found):
    program(checkout, "nvidia-smi", smi)
    for name in files:
        (checkout / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / "root" / name).touch()
    assert run(checkout, "scripts/device.sh", f"{checkout}/root").stdout == f"{found}\n"
    for device in ("cpu", "gpu"):
        assert run(checkout, "scripts/device.sh", f"{checkout}/root", DEVICE=device).stdout == f"{device}\n"


@pytest.mark.parametrize(("variables", "smi"), [({"DEVICE": "gpu"}, NO_GPU), ({}, GPU)])
def test_a_machine_with_a_gpu_gets_the_environment_of_the_gpu_lock(checkout, variables, smi):
    program(checkout, "nvidia-smi", smi)
    done = run(checkout, "scripts/install.sh", SLIME_TORCH_INDEX="https://index", **variables)
    assert done.returncode == 0, done.stderr
    record = (checkout / "record").read_text()
    pins = "torch==2.11.0 torchaudio==2.11.0 torchvision==0.26.0 uv=="
    assert f"--extra-index-url https://index --no-deps {pins}" in record
    assert "--no-deps -r requirements/gpu.lock.txt" in record and "cpu.lock.txt" not in record
    assert "torch.txt" not in record and "vision.txt" not in record
    assert (checkout / ".venv/.kind").read_text() == "gpu\n"
    again = run(checkout, "scripts/install.sh", **variables)
    assert again.stdout == "install: .venv is up to date\n"
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# an entry point more\n")
    assert "done in" in run(checkout, "scripts/install.sh", **variables).stdout


@pytest.mark.parametrize(
    ("programs", "why"),
    [
        ({"uname": "echo Linux aarch64"}, "is for Linux on x86-64, and this is Linux aarch64"),
        ({"python": "exit 1"}, "pip cannot bring requirements/browser.txt"),
        ({"npm": "exit 1"}, "npm cannot bring @sparticuz/chromium@"),
        ({"timeout": 'shift; [[ $1 != npm ]] || exit 124; exec "$@"'}, "npm cannot bring @sparticuz/chromium@"),
        ({"npm": "echo more >one.tgz"}, "is another file than the pinned one"),
    ],
)
def test_without_a_browser_the_reason_is_kept_for_the_tests_that_are_skipped(checkout, programs, why):
    (checkout / ".venv/bin").mkdir(parents=True)
    for name, text in ({"uname": "echo Linux x86_64", "npm": "exit 9", "python": "exit 0"} | programs).items():
        program(checkout, name, text)
    shutil.copy(checkout / "bin/python", checkout / ".venv/bin/python")
    done = run(checkout, "scripts/browser.sh")
    reason = (checkout / ".venv/browser/missing").read_text().strip()
    assert why in reason
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"browser: {reason}; tests in a browser will be skipped"
    assert [one.name for one in (checkout / ".venv").iterdir() if one.name.startswith("browser")] == ["browser"]


@pytest.mark.parametrize("made", ["cpu", "gpu", None])
def test_an_environment_of_the_other_kind_is_refused_and_left_alone(checkout, made):
    wanted = "cpu" if made == "gpu" else "gpu"
    (checkout / ".venv").mkdir()
    (checkout / ".venv/.installed").write_text("x\n")
    if made:  # no kind was recorded when only the CPU environment existed
        (checkout / ".venv/.kind").write_text(f"{made}\n")
    done = run(checkout, "scripts/install.sh", DEVICE=wanted)
    assert done.returncode == 2 and not (checkout / "record").exists()
    assert f".venv is the {made or 'cpu'} environment, and DEVICE={wanted} asks for the {wanted} one" in done.stderr
    assert f"set DEVICE={made or 'cpu'}; to replace it: rm -r .venv && DEVICE={wanted} make install" in done.stderr
    assert (checkout / ".venv/.installed").exists()
    program(checkout, "nvidia-smi", GPU)
    if wanted == "gpu":
        assert "and this machine asks for the gpu one" in run(checkout, "scripts/install.sh").stderr


def test_a_recipe_on_gpus_refuses_the_environment_for_cpus(checkout):
    (checkout / ".venv/bin").mkdir(parents=True)
    shutil.copy(checkout / "bin/python", checkout / ".venv/bin/python3")
    words = ("bash", "-c", 'source scripts/lib.sh; _start_ray_once() { echo "$1 GPUs"; }; start_ray 8')
    done = run(checkout, *words, DEVICE="gpu")
    assert done.returncode == 2 and done.stdout == ""
    assert ".venv is the cpu environment, and DEVICE=gpu asks for the gpu one" in done.stderr
    assert run(checkout, *words, DEVICE="cpu").stdout == "8 GPUs\n"
    done = run(checkout, *words, DEVICE="gpu", SLIME_SCRIPT_EXTERNAL_RAY="1")
    assert done.returncode == 0 and done.stdout == ""  # tools/plan.py, and clusters with another environment
    (checkout / ".venv/.kind").write_text("gpu\n")
    assert run(checkout, *words, DEVICE="gpu").stdout == "8 GPUs\n"


def test_the_image_has_what_make_install_reads_before_it_has_the_code(checkout, tmp_path):
    steps = (REPO / "Dockerfile").read_text().partition("\nRUN DEVICE=gpu")[0]
    image = tmp_path / "image"
    for line in re.findall(r"^COPY (.+)$", steps, flags=re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            (image / target).mkdir(parents=True, exist_ok=True)
            if (REPO / source).is_dir():
                shutil.copytree(REPO / source, image / target, dirs_exist_ok=True)
            else:
                shutil.copy(REPO / source, image / target)
    shutil.copytree(checkout / "bin", image / "bin")
    done = run(image, "scripts/install.sh", DEVICE="gpu")
    assert done.returncode == 0, done.stderr
    # What `uv pip install -e .` does there, which the recorder above only notes.
    build = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
    wheel = subprocess.run([sys.executable, "-c", build, image], cwd=image, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(image / wheel.stdout.split()[-1]) as made:
        [commands] = [made.read(name).decode() for name in made.namelist() if name.endswith("entry_points.txt")]
    assert "slime = slime.__main__:main" in commands
