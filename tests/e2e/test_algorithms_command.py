"""The command of the end-to-end table: its rows' flags exist, and its table says which runs reached the target."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slime.compose import parse_flags
from tests.e2e.algorithms import VARIANTS, Loop, Result, table


@pytest.mark.parametrize("loop", Loop)
def test_every_row_has_flags_that_exist(loop: Loop, tmp_path: Path) -> None:
    repo = Path(__file__).parents[2]
    record = tmp_path / "words"
    shell = f'ray() {{ printf "%s\\n" "$@" >"{record}"; }}; export -f ray; exec {repo}/scripts/run-tiny-cpu.sh'
    (tmp_path / "task/hf").mkdir(parents=True)
    (tmp_path / "task/hf/config.json").touch()  # what the script looks for
    variables = {"SLIME_SCRIPT_EXTERNAL_RAY": "1", "LOOP": loop.value, "TINY_DIR": str(tmp_path)}
    environment = dict(os.environ) | variables
    subprocess.run(["bash", "-c", shell], env=environment, check=True, timeout=250)
    words = record.read_text().splitlines()
    job = words[words.index("--") + 1 :]
    assert job[1] == ("train.py" if loop is Loop.SYNC else "train_async.py")
    for row in VARIANTS:
        if row.loop is loop:
            parse_flags([*job[2:], *(flag.replace("{run}", "/run") for flag in row.flags)])


def test_the_table_shows_means_and_who_never_arrived() -> None:
    greedy, differences = [(0, 0.2), (10, 1.0)], [(0, 1e-3)]
    curves = [[(0, 0.3), (5, 0.96)], [(0, 0.3), (5, 0.80), (10, 0.92)]]
    runs = [Result(VARIANTS[0], seed, "", curves[seed - 1], greedy, differences) for seed in (1, 2)]
    assert table(runs, 0.95).splitlines()[-1] == "| GRPO | 1, 2 | 0.300, 0.940 | 0.200, 1.000 | 5, never | 0.001 |"
