"""Commands with one mistake each, and what the message must say.

Each :class:`Broken` changes a working command: a published model on 8 GPUs, with 8 more for the engines.  The
tables are beside this file, by the place of the mistake: ``broken_words.py``, ``broken_layouts.py``,
``broken_settings.py``, ``broken_files.py``.  ``test_broken_configurations.py`` feeds them to the parser, without a
GPU, Ray or a real checkpoint.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Any, Literal

from slime.utils.errors import ConfigError

BASE = """
--hf-checkpoint $model --ref-load $model --prompt-data $folder/prompts.jsonl --label-key label --rm-type math
--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 2048 --num-rollout 100
--global-batch-size 256 --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8
"""
"""A working command, without the model's flags.  ``$folder`` has the files, ``$model`` the checkpoint."""

PROMPTS = '{"input": "1+1=", "label": "2"}\n{"input": "2+2=", "label": "4"}\n' * 20
DENSE, EXPERTS, SPARSE = "qwen3-4B", "qwen3-30B-A3B", "glm5.2-744B-A40B"


@dataclass(frozen=True, kw_only=True)
class Broken:
    """One mistake, and the words that its message must contain.

    ``says`` has every part of the message that the user needs: the flag with its value, what is allowed, and
    what to change.
    """

    mistake: str
    says: tuple[str, ...]
    flags: str = ""
    """Words added to the command, which a shell would split."""
    without: tuple[str, ...] = ()
    """Flags removed from the command, with their values."""
    script: str = DENSE
    """File of scripts/models that the command sources."""
    checkpoint: str | None = None
    """The published model whose config.json is in ``--hf-checkpoint``; default: the script's."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Entries changed in config.json."""
    files: Mapping[str, str | None] = field(default_factory=dict)
    """Files below ``$folder`` and their content; None removes a file."""
    program: Literal["train.py", "train_async.py"] = "train.py"
    error: type[Exception] | None = ConfigError
    """None: the command runs, and the message is a log line."""

    def words(self, folder: str) -> list[str]:
        """The command's arguments, without the model's flags, with its files in ``folder``."""
        places = {"folder": folder, "model": f"{folder}/model"}
        kept = shlex.split(Template(BASE).safe_substitute(places))
        for flag in self.without:
            position = kept.index(flag)
            del kept[position : position + 2]
        return [*kept, *shlex.split(Template(self.flags).safe_substitute(places))]
