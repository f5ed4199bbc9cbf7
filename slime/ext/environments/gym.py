"""Tasks of the package reasoning-gym as prompts: ``--prompt-data 'gym:TASK?size=1000&seed=1'``.

Question number ``index`` depends on task and config alone.  A row holds these, with which ``rm_hub.gym`` makes the
question again to score answers to it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from slime.rollout.prompt_files import parse_query
from slime.rollout.rm_hub.gym import QuestionWorker
from slime.utils.errors import ConfigError, DataError

DEFAULTS = {"size": 500, "seed": 0}
ROWS_AT_ONCE = 32
MAKE_LIMIT_S = 600.0
"""For so many questions."""


def parse_task(path: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the config of ``gym:TASK?key=value&...``."""
    name, config = parse_query(path)
    return name, DEFAULTS | config


def read_task(path: str, rows: slice, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(where, row)`` for the selected questions of a task, with the keys input, label and metadata.

    Raises:
        ConfigError: the package is not installed.
        DataError: there is no such task, or its config is wrong.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(f"{flag} {path} needs the package reasoning-gym; pip install -e '.[gym]'.")
    task, config = parse_task(path)
    system = str(config.pop("system", ""))
    size = config["size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise DataError(f"{flag} {path}: size is {size!r}; it must be a number of questions from 1 on.")
    chosen = range(size)[rows]
    worker = QuestionWorker(time_limit_s=MAKE_LIMIT_S)
    try:
        for first in range(0, len(chosen), ROWS_AT_ONCE):
            indices = list(chosen[first : first + ROWS_AT_ONCE])
            made = worker.answer_to({"task": task, "config": config, "indices": indices})
            if not isinstance(made, dict) or "rows" not in made:
                said = made["error"] if isinstance(made, dict) else f"nothing within {MAKE_LIMIT_S:.0f} s"
                raise DataError(f"{flag} {path}: reasoning-gym says: {said}. Correct the name or the config.")
            for index, (question, label) in zip(indices, made["rows"], strict=True):
                asked = [{"role": "system", "content": system}, {"role": "user", "content": question}]
                own = {"task": task, "config": config, "index": index}
                metadata = {"rm_type": "gym", "source_name": task, "gym": own}
                row = {"input": asked if system else question, "label": label, "metadata": metadata}
                yield f"{path} question {index}", row
    finally:
        worker.close()
