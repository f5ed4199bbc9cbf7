"""A recipe's argument list, read by running the script with recorders in the place of what it would start."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.utils import env
from slime.utils.errors import ConfigError

TIMEOUT_S = 120
PRETENDED_GPUS = 8
"""What a script that counts the GPUs of its machine is told."""
_RECORDER = r"""
ray() { printf '%s\0' "$@" >"${SLIME_PLAN_RECORD}"; }
nvidia-smi() { for i in $(seq 0 $((SLIME_PLAN_GPUS - 1))); do echo "GPU $i: planned"; done; }
ssh() { :; }
export -f ray nvidia-smi ssh
"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a script submits."""

    words: list[str]
    """The arguments of train.py or train_async.py."""
    environment: dict[str, str] = field(default_factory=dict)


def read_recipe(script: str, more: Sequence[str], folder: Path) -> Recipe:
    """Run ``script`` as far as its ``ray job submit``, which is written down instead of done.

    Args:
        script: a file like those of scripts/run-*.sh.
        more: flags behind its own.
        folder: takes the temporary files that the script writes; the words may name one (an --sglang-config).

    Raises:
        ConfigError: the script is missing, fails, or submits no job.
    """
    if not Path(script).is_file():
        raise ConfigError(f"{script} does not exist; give a recipe (scripts/run-*.sh) or the arguments of train.py.")
    record = folder / "submitted"
    variables = {
        "SLIME_SCRIPT_EXTERNAL_RAY": "1",
        "SLIME_PLAN_RECORD": str(record),
        "SLIME_PLAN_GPUS": str(PRETENDED_GPUS),
        "TMPDIR": str(folder),
        "BASE_DIR": env.get_str("BASE_DIR", "/base") or "/base",
        "MASTER_ADDR": env.get_str("MASTER_ADDR", "10.0.0.1") or "10.0.0.1",
    }
    command = f"{_RECORDER}\nexec bash {shlex.quote(str(Path(script).resolve()))} {shlex.join(more)}"
    done = subprocess.run(
        ["bash", "-c", command], env=env.copy() | variables, capture_output=True, text=True, check=False,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    if done.returncode or not record.is_file():
        raise ConfigError(
            f"{script} ended with {done.returncode} before it submitted a job: "
            f"{done.stderr.strip()[-500:] or 'it printed nothing'}. Correct it, or give the arguments of train.py."
        )
    submitted = record.read_text().split("\0")[:-1]
    job = submitted[submitted.index("--") + 1 :]
    environment: dict[str, str] = {}
    if "--runtime-env-json" in submitted:
        environment = json.loads(submitted[submitted.index("--runtime-env-json") + 1]).get("env_vars", {})
    start = next(index for index, word in enumerate(job) if word.endswith(".py")) + 1
    return Recipe(job[start:], environment)
