"""Tests a model's tokenizer and chat template in a child process at the start of a job, and counts tokens of prompts.

Both are programs written by whoever made the model folder.  Run directly in the job, a program that never ends would
hang the job, and one that produces gigabytes of text would kill it without an error message.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from slime.rollout import trial_child
from slime.rollout.prompts import (
    RENDER_TIMEOUT_S,
    LengthCheck,
    PromptLimit,
    Row,
    TemplateCheck,
    map_with_deadline,
    render,
)
from slime.utils import env
from slime.utils.chat_template import MAX_RENDERED_CHARS, check_rendered, check_roles, refused
from slime.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

TRIAL_TIMEOUT_S = 600.0
"""Limit for the whole trial.  Each step is limited by ``RENDER_TIMEOUT_S``, but imports from a slow disk are not."""
KILL_TIMEOUT_S = 30.0
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Threads reserve memory, which counts toward the memory limit."""
REMEDY = "Download the model again; if the file is as its maker wrote it, do not use this model."


class TokenizerTrial:
    """Context manager for a child process that tests a model's tokenizer, and its chat template on some rows."""

    def __init__(self, folder: str, *, has_template: bool, trusts_code: bool) -> None:
        """Start the process.

        Args:
            folder: Model folder.
            has_template: Whether rows will be rendered.  If not, only tokenizer.json is tested, which is ten times
                faster.
            trusts_code: Whether the folder's Python code may run.
        """
        self.folder, self._trusts_code = folder, trusts_code
        self._rows: list[Row] = []
        self._lengths: list[LengthCheck] = []
        self._process: subprocess.Popen[bytes] | None = None
        if has_template or (Path(folder) / "tokenizer.json").is_file():
            settings = {"folder": folder, "has_template": has_template, "trusts_code": trusts_code}
            settings |= {"limit_s": round(RENDER_TIMEOUT_S), "max_chars": MAX_RENDERED_CHARS}
            self._process = subprocess.Popen(
                [sys.executable, "-P", trial_child.__file__, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=env.copy() | ONE_THREAD,
            )

    def __enter__(self) -> TokenizerTrial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate(timeout=KILL_TIMEOUT_S)

    def template(self, kwargs: Mapping[str, Any] | None) -> TemplateCheck:
        """Return a collector for the rows of a data set, which will be rendered with ``kwargs``."""
        return TemplateCheck(kwargs or {}, self._rows)

    def lengths(self, limit: PromptLimit | None, kwargs: Mapping[str, Any] | None) -> LengthCheck | None:
        """Return a collector for the long prompts of a data set; None without a limit.

        ``kwargs`` is None if no template renders the prompts.
        """
        if limit is None:
            return None
        self._lengths.append(LengthCheck(limit, kwargs))
        return self._lengths[-1]

    def finish(self) -> None:
        """Wait for the trial, and check the rendered rows and the lengths of the longest prompts.

        Raises:
            ConfigError: the tokenizer cannot be loaded, does not finish, or takes too much memory.
            DataError: the template does not finish, takes too much memory, refuses a row, or renders unusable text; or
                a prompt does not fit into an engine.
        """
        if self._process is None:
            return
        long = [(check.limit, row) for check in self._lengths for row in check.rows]
        rows = [*self._rows, *(row for _, row in long)]
        try:
            output, _ = self._process.communicate(json.dumps(rows, default=str).encode(), timeout=TRIAL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"--hf-checkpoint {self.folder}: the trial of its tokenizer took over {TRIAL_TIMEOUT_S:.0f} s. Is "
                "the disk of the model, or that of this Python environment, slow?"
            ) from error
        said = [json.loads(line) for line in output.splitlines()]
        if any("cannot_load" in facts for facts in said):
            self._render_here(rows)
            return
        place = next((facts["begins"] for facts in reversed(said) if "begins" in facts), "import")
        if self._process.returncode:
            self._refuse(place, next((facts["broke"] for facts in said if "broke" in facts), None))
            return
        template = next(facts["template"] for facts in said if "template" in facts)
        answers = [facts for facts in said if facts.keys() & {"text", "reason"}]
        judge(rows, answers, template)
        for (limit, (where, *_)), answer in zip(long, answers[len(self._rows) :], strict=True):
            limit.check(where, answer["tokens"])

    def _render_here(self, rows: list[Row]) -> None:
        """Render the rows in this process: the tokenizer needs torch, or loading it here raises the actual error."""
        if rows:
            from slime.utils.processing_utils import load_tokenizer

            tokenizer = load_tokenizer(self.folder, trust_remote_code=self._trusts_code)
            rendered = ((where, (prompt, kwargs)) for where, prompt, kwargs in rows if not isinstance(prompt, str))
            map_with_deadline(lambda where, row: render(tokenizer, row[0], None, where, **row[1]), rendered)

    def _refuse(self, place: str, error: str | None) -> None:
        """Raise the error for a trial that died or timed out at ``place``; only warn if that was an import."""
        assert self._process is not None
        code = self._process.returncode
        what = f"ended with {error or f'signal {-code}'}; it may take {trial_child.MEMORY_BYTES >> 30} GiB"
        if code == -signal.SIGALRM:
            what = f"was still running after {RENDER_TIMEOUT_S:.0f} s"
        if place == "import":
            logger.warning("The tokenizer of %s is not tried before its use: the trial %s.", self.folder, what)
        elif place == "tokenizer":
            raise ConfigError(
                f"--hf-checkpoint: the tokenizer of {self.folder} (tokenizer.json) {what}. A regular expression of "
                f"its normalizer or pre_tokenizer may never end. {REMEDY}"
            )
        else:
            raise DataError(
                f"{place}: the chat template {what}; a loop in it may never end. Fix the template of --hf-checkpoint "
                f"{self.folder} (chat_template.jinja), or the row."
            )


def judge(rows: list[Row], answers: list[dict[str, Any]], template: str) -> None:
    """Check what ``trial_child.answers`` rendered from the rows.

    Raises:
        DataError: the template refuses a row, or renders text that cannot be trained on.
    """
    for (where, messages, kwargs), answer in zip(rows, answers, strict=True):
        if isinstance(messages, str):
            continue  # nothing rendered it
        if "reason" in answer:
            raise refused(where, messages, answer["reason"])
        check_rendered(answer["text"], messages, kwargs, template, where)
        check_roles(template, messages, answer["text"], where)
