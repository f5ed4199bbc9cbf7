"""The dtype in which an engine computes, which is also that of the weights that are pushed to it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slime.utils.json_file import read_model_config


def own_dtype(args: Namespace, asked: str | None) -> str | None:
    """Return the dtype of an engine that this job starts: ``asked``, or the trainer's, so that log-probs agree.

    SGLang's "auto" is no answer: it would take float16 for a checkpoint written in float32.
    """
    if asked not in (None, "auto"):
        return asked
    if args.fp16:
        return "float16"
    if args.bf16:
        return "bfloat16"
    return "float32" if args.fp32 else None


def served_dtype(asked: str, folder: str) -> str:
    """Return the dtype of an engine whose ServerArgs have ``asked``; "auto" follows config.json as SGLang does.

    "" where there is no config.json to read.
    """
    if asked != "auto":
        return asked
    if not (Path(folder) / "config.json").is_file():
        return ""
    config = read_model_config(folder)
    parts = (config, config.get("text_config") or {})
    named = next((name for part in parts if (name := part.get("dtype") or part.get("torch_dtype"))), "float32")
    if str(named) != "float32":
        return str(named)
    return "bfloat16" if str(config.get("model_type")).startswith("gemma") else "float16"
