"""What the flags of the weight update may combine."""

from __future__ import annotations

import pytest

from slime.flags.parse import slime_validate_args
from slime.utils.errors import ConfigError

DISK = ("--update-weight-transport", "disk", "--update-weight-disk-dir", "/shared/versions")
DELTA = (*DISK, "--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", "/local/copy")


@pytest.fixture
def complaint(make_args):
    def run(*words):
        with pytest.raises(ConfigError) as caught:
            slime_validate_args(make_args(*words))
        return str(caught.value)

    return run


@pytest.mark.parametrize("words", [DISK, DELTA, (*DISK, "--update-weight-disk-keep-files"), (*DISK, "--colocate"),
                                   (*DISK, "--release-train", "--save", "/ckpt")])  # fmt: skip
def test_weights_may_travel_over_disk(make_args, words):
    slime_validate_args(make_args(*words))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (DISK[:2], "--update-weight-transport disk needs --update-weight-disk-dir"),
        (
            DISK[2:],
            "--update-weight-disk-dir is /shared/versions, which has no effect unless weights travel over disk",
        ),
        (("--update-weight-disk-keep-files",), "--update-weight-disk-keep-files has no effect unless"),
        (("--weight-push-failure", "refill"), "which needs --use-fault-tolerance"),
        (("--update-weight-mode", "delta"), "travels over disk only, and --update-weight-transport is nccl"),
        (DELTA[:-2], "name its folder: --update-weight-local-checkpoint-dir"),
        ((*DELTA, "--colocate"), "--update-weight-mode delta and --colocate exclude each other"),
        (
            (*DISK, "--update-weight-local-checkpoint-dir", "/shared/versions"),
            "give the versions a folder of their own",
        ),
        (("--release-train", "--save", "/ckpt"), "--update-weight-transport is nccl and --update-weight-mode is full"),
        ((*DISK, "--release-train"), "name their folder: --save"),
        ((*DISK, "--release-train", "--save", "/ckpt", "--keep-old-actor"), "drop one of them"),
        ((*DISK, "--save", "/shared/versions"), "--update-weight-disk-dir and --save are both /shared/versions"),
    ],
)
def test_what_cannot_work_names_the_flags(complaint, words, says):
    assert says in complaint(*words)


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ((), "stop"),
        (("--use-fault-tolerance",), "refill"),
        (("--use-fault-tolerance", "--weight-push-failure", "drop"), "drop"),
    ],
)
def test_engines_that_take_no_push_are_started_again_where_engines_are_at_all(make_args, words, policy):
    args = make_args(*words)
    slime_validate_args(args)
    assert args.weight_push_failure == policy
