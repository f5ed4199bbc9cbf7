"""Commands with one mistake in them, and what the user must be told.

Each :class:`Broken` changes a command that works: a published model on 8 GPUs, with 8 more for the engines.  The
tables lie beside this file, by where the mistake is: ``broken_words.py``, ``broken_layouts.py``,
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
"""A command that works, without the flags of the model.  ``$folder`` has the files, ``$model`` the checkpoint."""

PROMPTS = '{"input": "1+1=", "label": "2"}\n{"input": "2+2=", "label": "4"}\n' * 20
DENSE, EXPERTS, SPARSE = "qwen3-4B", "qwen3-30B-A3B", "glm5.2-744B-A40B"


@dataclass(frozen=True, kw_only=True)
class Broken:
    """One mistake, and the words that its message must have.

    ``says`` has every part of the message that the user needs: the flag with the value received, what is allowed, and
    what to change.
    """

    mistake: str
    says: tuple[str, ...]
    flags: str = ""
    """Added to the command, as a shell would split them."""
    without: tuple[str, ...] = ()
    """Flags of the command that are taken out, with their values."""
    script: str = DENSE
    """File of scripts/models that is sourced."""
    checkpoint: str | None = None
    """The published model whose config.json is in ``--hf-checkpoint``; default: that of the script."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of config.json that differ from it."""
    files: Mapping[str, str | None] = field(default_factory=dict)
    """Files below ``$folder`` and what they hold; None takes a file away."""
    program: Literal["train.py", "train_async.py"] = "train.py"
    error: type[Exception] | None = ConfigError
    """None: the command runs, and the message is a line of the log."""

    def words(self, folder: str) -> list[str]:
        """The command behind the program's name, without the model's flags, with its files in ``folder``."""
        places = {"folder": folder, "model": f"{folder}/model"}
        kept = shlex.split(Template(BASE).safe_substitute(places))
        for flag in self.without:
            position = kept.index(flag)
            del kept[position : position + 2]
        return [*kept, *shlex.split(Template(self.flags).safe_substitute(places))]
