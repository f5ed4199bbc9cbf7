"""The schedule of a resumed run."""

from __future__ import annotations

import logging

import pytest

from slime.backends.megatron_utils.checkpoints.resumed_state import _flags_schedule

SAVED = {
    **{"max_lr": 1e-6, "lr_decay_style": "constant", "lr_decay_steps": 64, "num_steps": 32},
    **{"wd_incr_style": "constant", "wd_incr_steps": 64},
}


@pytest.mark.parametrize(
    ("style", "said"), [("constant", "max_lr 1e-06 -> 2e-06"), ("linear", "lr_decay_steps 64 -> 128, max_lr")]
)
def test_a_longer_run_changes_only_a_schedule_that_decays(caplog, style, said):
    saved = SAVED | {"lr_decay_style": style}
    ours = saved | {"max_lr": 2e-6, "lr_decay_steps": 128, "wd_incr_steps": 128, "num_steps": 0}
    with caplog.at_level(logging.WARNING):
        assert _flags_schedule(ours, saved) == ours | {"num_steps": 32}
    assert caplog.messages[0].partition(": ")[2].startswith(said)
