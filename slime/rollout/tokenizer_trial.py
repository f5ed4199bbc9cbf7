"""The trial of a model's tokenizer and chat template, in a child process, at the start of a job.

Both are programs of whoever made the model folder.  Loaded in the job, one that never ends stops the job, and one that
makes gigabytes of text ends it without a word.
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
from slime.rollout.prompts import RENDER_TIMEOUT_S, Row, TemplateCheck, map_with_deadline, render
from slime.utils import env
from slime.utils.chat_template import MAX_RENDERED_CHARS, check_rendered, check_roles, refused
from slime.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

TRIAL_TIMEOUT_S = 600.0
"""For the whole; imports from a slow disk take their time, and each step has ``RENDER_TIMEOUT_S``."""
KILL_TIMEOUT_S = 30.0
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Threads reserve memory, which counts against the limit."""
REMEDY = "Download the model again; if the file is as its maker wrote it, do not use this model."


class TokenizerTrial:
    """A child process that tries a model's tokenizer, and its chat template on some rows.  It ends with the block."""

    def __init__(self, folder: str, *, has_template: bool, trusts_code: bool) -> None:
        """Start the process.

        Args:
            folder: of the model.
            has_template: whether rows will be rendered; else tokenizer.json is tried alone, in a tenth of the time.
            trusts_code: whether the folder's Python code may run.
        """
        self.folder, self._trusts_code = folder, trusts_code
        self._rows: list[Row] = []
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
        """Return what gathers the rows of a data set, to be rendered with ``kwargs``."""
        return TemplateCheck(kwargs or {}, self._rows)

    def finish(self) -> None:
        """Wait for the trial, and look at the texts of the rows.

        Raises:
            ConfigError: the tokenizer cannot be loaded, does not end, or takes too much memory.
            DataError: the template does so, refuses a row, or prints what is no text.
        """
        if self._process is None:
            return
        rows = json.dumps([row[:3] for row in self._rows], default=str).encode()
        try:
            output, _ = self._process.communicate(rows, timeout=TRIAL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"--hf-checkpoint {self.folder}: the trial of its tokenizer took over {TRIAL_TIMEOUT_S:.0f} s. Is "
                "the disk of the model, or that of this Python environment, slow?"
            ) from error
        said = [json.loads(line) for line in output.splitlines()]
        if any("cannot_load" in facts for facts in said):
            self._render_here()
            return
        place = next((facts["begins"] for facts in reversed(said) if "begins" in facts), "import")
        if self._process.returncode:
            self._refuse(place, next((facts["broke"] for facts in said if "broke" in facts), None))
            return
        template = next(facts["template"] for facts in said if "template" in facts)
        judge(self._rows, [facts for facts in said if facts.keys() & {"text", "reason"}], template)

    def _render_here(self) -> None:
        """Render the rows in this process: the tokenizer is one that needs torch, or cannot be loaded here either."""
        if self._rows:
            from slime.utils.processing_utils import load_tokenizer

            tokenizer = load_tokenizer(self.folder, trust_remote_code=self._trusts_code)
            rows = ((where, (messages, kwargs)) for where, messages, kwargs in self._rows)
            map_with_deadline(lambda where, row: render(tokenizer, row[0], None, where, **row[1]), rows)

    def _refuse(self, place: str, error: str | None) -> None:
        """Raise for a trial that came to no end at ``place``."""
        assert self._process is not None
        code = self._process.returncode
        what = f"ended with {error or f'signal {-code}'}; it may take {trial_child.MEMORY_BYTES >> 30} GiB"
        if code == -signal.SIGALRM:
            what = f"was still at work after {RENDER_TIMEOUT_S:.0f} s"
        if place == "import":
            logger.warning("The tokenizer of %s is not tried before its use: the trial %s.", self.folder, what)
        elif place == "tokenizer":
            raise ConfigError(
                f"--hf-checkpoint: the tokenizer of {self.folder} (tokenizer.json) {what}. A regular expression of "
                f"its normalizer or pre_tokenizer may never end. {REMEDY}"
            )
        else:
            raise DataError(
                f"{place}: the chat template {what}; a loop in it may never end. Mend the template of --hf-checkpoint "
                f"{self.folder} (chat_template.jinja), or the row."
            )


def judge(rows: list[Row], answers: list[dict[str, Any]], template: str) -> None:
    """Look at what ``trial_child.answers`` made of the rows.

    Raises:
        DataError: the template refuses a row, or its text is none to train on.
    """
    for (where, messages, kwargs), answer in zip(rows, answers, strict=True):
        if "reason" in answer:
            raise refused(where, messages, answer["reason"])
        check_rendered(answer["text"], messages, kwargs, template, where)
        check_roles(template, messages, answer["text"], where)
