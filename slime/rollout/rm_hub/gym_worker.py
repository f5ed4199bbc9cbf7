"""The child process of ``gym``: generates reasoning-gym questions and scores answers.

Runs as a script or by ``python -c``, without importing slime.  It answers each line on standard input with one line::

    {"task", "config", "indices"}            -> {"rows": [[question, answer], ...]}
    {"task", "config", "index", "answer"}    -> {"score": number}

PYTHONHASHSEED must be fixed: some tasks draw from sets, so their questions would differ between processes.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any


@functools.lru_cache(64)
def _dataset(task: str, config: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(config))


@functools.lru_cache(256)
def _entry(task: str, config: str, index: int) -> Any:
    """Return a question, cached because answers to the same question are scored in a row."""
    return _dataset(task, config)[index]


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one line."""
    task, config = question["task"], json.dumps(question["config"], sort_keys=True)
    if "indices" in question:
        entries = [_dataset(task, config)[index] for index in question["indices"]]
        return {"rows": [[entry["question"], entry["answer"]] for entry in entries]}
    entry = _entry(task, config, question["index"])
    return {"score": float(_dataset(task, config).score_answer(answer=question["answer"], entry=entry))}


def main() -> None:
    """Answer until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # tasks may print to standard output
    for line in sys.stdin:
        try:
            said = answer(json.loads(line)) if line.strip() else {}
        except Exception as error:  # process boundary: tasks and scorers may raise anything
            said = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
