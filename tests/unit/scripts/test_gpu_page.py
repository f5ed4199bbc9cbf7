"""The commands of docs/gpu.md, verbatim, as far as a machine without GPUs can run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

from tests.contracts.source_tree import REPO

PAGE = (REPO / "docs/gpu.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
STEPS = [shlex.split(line, comments=True) for line in BLOCKS[0].splitlines()]


def shell(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"HF_HUB_DISABLE_UPDATE_CHECK": "1"} | variables
    return subprocess.run(words, cwd=REPO, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_blocks_parse_and_name_files_that_exist():
    for block in BLOCKS:
        assert subprocess.run(["bash", "-n"], input=block, text=True, check=False).returncode == 0
        for word in shlex.split(block, comments=True):
            if word.startswith(("scripts/", "tools/")):
                assert (REPO / word).is_file()


def test_the_way_is_install_doctor_demo_model_data_conversion_plan_run():
    way = [next(word for word in words if "=" not in word) for words in STEPS]
    assert way == ["make", "source", "slime", "make", "hf", "hf", "hf", "slime", "slime", "scripts/run-qwen3-4B.sh"]
    for words in STEPS:
        if words[0] == "make":
            assert shell("make", "-n", *words[1:]).returncode == 0


def test_the_plan_of_the_page_runs():
    words = next(words for words in STEPS if "plan" in words)
    done = shell(sys.executable, "-m", *words[1:], BASE_DIR="/models")
    assert words[:2] == ["BASE_DIR=/models", "slime"]
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr


def test_the_doctor_answers():
    words = next(words for words in STEPS if "doctor" in words)
    done = shell(sys.executable, "-m", *words, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: doctor.py")
