"""Which flags of disk pushes can be combined."""

from __future__ import annotations

import argparse
import importlib.util
from argparse import Namespace
from typing import Any

import pytest

from slime.ext.fast_push.disk.flags import GROUP, add_disk_push_arguments
from slime.flags.group import derive_all, problems_of

OTHERS: dict[str, Any] = {
    **{"hf_checkpoint": "/model", "save": None, "save_interval": None, "update_weights_interval": 3},
    **dict.fromkeys(("colocate", "use_critic", "keep_old_actor", "eval_in_background"), False),
    **{
        "ref_update_interval": None,
        "trainer_recovery": "off",
        "weight_push": "verified",
        "push_sends_model": True,
        "spare_nodes": 0,
    },
    **{"offload_train": None, "offload_rollout": None},
    **{"custom_update_weight_post_write_path": None, "sglang_custom_pull_weights_pre_read_hook": None},
}
DISK = "--update-weight-transport disk --update-weight-disk-dir /shared/versions"
DELTA = f"{DISK} --update-weight-mode delta --update-weight-local-checkpoint-dir /local/copy"


def resolved(words: str, **others: Any) -> Namespace:
    parser = argparse.ArgumentParser()
    add_disk_push_arguments(parser)
    args = parser.parse_args(words.split(), Namespace(**OTHERS | others))
    derive_all(args, [GROUP])
    return args


def complaints(words: str, **others: Any) -> str:
    return " ".join(problems_of(resolved(words, **others), [GROUP]))


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ("", {}),
        (DISK, {"colocate": True}),
        (DELTA, {}),
        (f"{DISK} --update-weight-disk-keep-files", {}),
        (f"{DISK} --release-train", {"save": "/ckpt"}),
        (f"{DELTA} --update-weight-delta-encoding overwrite", {}),
    ],
)
def test_weights_may_travel_over_disk(words: str, others: dict[str, Any]) -> None:
    assert complaints(words, **others) == ""


@pytest.mark.parametrize(
    ("words", "others", "says"),
    [
        (
            "--update-weight-transport disk",
            {},
            "no effect without --update-weight-disk-dir",
        ),
        (DISK, {"save": "/shared/versions"}, "--update-weight-disk-dir and --save are both /shared/versions"),
        (DISK, {"weight_push": "plain"}, "has no effect without --weight-push verified"),
        (DISK, {"push_sends_model": False}, "does not go with --lora-push adapter"),
        (
            f"{DISK} --update-weight-local-checkpoint-dir /shared/versions",
            {},
            "give the versions another folder",
        ),
        ("--update-weight-disk-dir /v", {}, "--update-weight-disk-dir /v has no effect without"),
        ("--update-weight-disk-keep-files", {}, "-keep-files has no effect without --update-weight-transport disk"),
        ("--update-weight-mode delta", {}, "delta has no effect without --update-weight-transport disk"),
        (f"{DISK} --update-weight-mode delta", {}, "without --update-weight-local-checkpoint-dir"),
        (DELTA, {"colocate": True}, "--update-weight-mode delta and --colocate contradict each other"),
        (DELTA, {"eval_in_background": True}, "use full"),
        ("--update-weight-delta-encoding overwrite", {}, "no effect without --update-weight-mode delta"),
        ("--release-train", {"save": "/ckpt"}, "no effect without --update-weight-transport disk"),
        (f"{DISK} --release-train", {}, "no effect without --save"),
        (
            f"{DISK} --release-train",
            {"keep_old_actor": True},
            "--release-train and --keep-old-actor contradict",
        ),
        (f"{DISK} --release-train", {"spare_nodes": 1}, "--release-train and --spare-nodes 1 contradict"),
        (f"{DISK} --release-train", {"trainer_recovery": "memory"}, "--trainer-recovery memory contradict"),
    ],
)
def test_what_cannot_work_names_the_flags(words: str, others: dict[str, Any], says: str) -> None:
    assert says in complaints(words, **others)


def test_a_released_trainer_saves_and_pushes_after_every_rollout_and_its_engines_sleep() -> None:
    for interval in (None, 5):
        args = resolved(f"{DISK} --release-train", save="/ckpt", save_interval=interval, colocate=True)
        assert (args.save_interval, args.update_weights_interval) == (1, 1)
        assert (args.offload_train, args.offload_rollout) == (False, True)


@pytest.mark.skipif(importlib.util.find_spec("blake3") is not None, reason="blake3 is installed: nothing to refuse")
def test_a_checksum_without_its_package_is_refused_before_the_run() -> None:
    assert "pip install blake3" in complaints(f"{DELTA} --update-weight-delta-checksum blake3")
