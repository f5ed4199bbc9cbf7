"""Plug-ins that record a run, so that a test can account for every prompt group.

``AUDIT_DIR`` in the environment names the folder.
"""

import json
import os
import time
from pathlib import Path

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std


def _append(name: str, record: dict) -> None:
    line = (json.dumps(record) + "\n").encode()
    descriptor = os.open(Path(os.environ["AUDIT_DIR"]) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, line)
    os.close(descriptor)


def filter_and_note(args, samples, **kwargs) -> DynamicFilterOutput:
    """``check_reward_nonzero_std``, with a line in ``dropped.jsonl`` for each group it drops."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    if not output.keep:
        _append("dropped.jsonl", {"group": samples[0].group_index, "reason": output.reason})
    return output


def note_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler) -> None:
    """Write a line to ``steps.jsonl`` when an optimizer step begins."""
    _append("steps.jsonl", {"rollout": rollout_id, "step": step_id})


def note_answer(args, sample, evaluation: bool = False) -> None:
    """A sample hook: write a line to ``answers.jsonl`` with the tokens generated for the sample so far."""
    if not evaluation:
        tokens = sample.tokens[len(sample.tokens) - sample.response_length :]
        drawn = {"tokens": tokens, "log_probs": sample.rollout_log_probs or []}
        _append("answers.jsonl", {"time": time.time(), "sample": sample.index} | drawn)
