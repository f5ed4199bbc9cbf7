"""``--rm-type ifbench``: checks with AllenAI's IFBench that the response follows every instruction of its prompt.

IFBench is a git repository, not a package.  It is imported from the folder ``IFBench`` next to this repository, and
cloned there on first use if missing.  Source: IFBench, arXiv:2507.02833.
"""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.utils.errors import ConfigError, DataError

IFBENCH_URL = "https://github.com/allenai/IFBench.git"
IFBENCH_FOLDER = Path(__file__).resolve().parents[4] / "IFBench"
CLONE_TIMEOUT_S = 600.0

_lock = threading.Lock()


@functools.cache
def _load_checkers(folder: Path) -> ModuleType:
    """Import IFBench's ``evaluation_lib``."""
    if not (folder / "evaluation_lib.py").is_file():
        _clone(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        return importlib.import_module("evaluation_lib")
    except ImportError as error:
        raise ConfigError(
            f"--rm-type ifbench needs the packages of IFBench: {error}. "
            f"Run: {sys.executable} -m pip install -r {folder}/requirements.txt"
        ) from error


def _clone(folder: Path) -> None:
    command = ["git", "clone", "--depth", "1", IFBENCH_URL, str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=CLONE_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        raise ConfigError(
            f"--rm-type ifbench needs AllenAI's IFBench in {folder}, and it cannot be fetched: {detail}. "
            f"Put it there: {' '.join(command)}"
        ) from error


def compute_ifbench_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1.0 if the response strictly follows every instruction in ``metadata``, else 0.0.

    Args:
        metadata: ``instruction_id_list``, ``kwargs`` (one mapping per instruction), ``prompt_text``, ``record_id``.

    Raises:
        DataError: ``metadata`` has no ``instruction_id_list``.
        ConfigError: IFBench cannot be cloned or imported.
    """
    if not response:
        return 0.0
    if not metadata or not metadata.get("instruction_id_list"):
        raise DataError(
            "A sample graded by ifbench has no metadata['instruction_id_list']; it needs instruction_id_list, kwargs "
            "and prompt_text. Check --metadata-key and the data file."
        )
    instructions = list(metadata["instruction_id_list"])
    raw_kwargs = list(metadata.get("kwargs") or [{} for _ in instructions])
    # Data files pad the keyword arguments of all instructions to one schema; the checkers accept only set ones.
    kwargs = [{name: value for name, value in (entry or {}).items() if value is not None} for entry in raw_kwargs]
    prompt = str(metadata.get("prompt_text") or "")
    with _lock:
        checkers = _load_checkers(IFBENCH_FOLDER)
    example = checkers.InputExample(
        key=metadata.get("record_id") or 0, instruction_id_list=instructions, prompt=prompt, kwargs=kwargs
    )
    result = checkers.test_instruction_following_strict(example, {prompt: response})
    return float(bool(result.follow_all_instructions))
