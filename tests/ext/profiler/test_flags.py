"""Flags of the profiler."""

from __future__ import annotations

from argparse import Namespace

from slime.compose import parse_flags
from slime.ext.profiler.flags import check_profiler


def test_the_profiler_of_megatron_is_turned_on_by_its_flags():
    words = "--use-pytorch-profiler --profile-step-start 3 --profile-step-end 5 --tensorboard-dir traces"
    args = parse_flags(words.split())
    assert (args.use_pytorch_profiler, args.profile_step_start, args.profile_step_end) == (True, 3, 5)
    assert args.tensorboard_dir == "traces"


def test_a_window_of_no_rollout_and_a_recorder_that_is_missing_are_refused():
    flags = {"use_pytorch_profiler": True, "profile_step_start": 3}
    recorder, window = check_profiler(Namespace(**flags, profile_step_end=3, memory_recorder="memray"))
    assert "--profile-step-end 3" in window and "--memory-recorder is 'memray'" in recorder
    assert not list(check_profiler(Namespace(**flags, profile_step_end=4, memory_recorder="torch")))
