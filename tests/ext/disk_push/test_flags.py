"""What the flags of changes over a disk may combine."""

from __future__ import annotations

import argparse
import importlib.util
from argparse import Namespace

import pytest

from slime.ext.disk_push.flags import GROUP
from slime.flags.group import problems_of


def complaints(*words: str, mode: str = "delta") -> str:
    parser = argparse.ArgumentParser()
    GROUP.add(parser)
    return " ".join(problems_of(Namespace(**vars(parser.parse_args(words)), update_weight_mode=mode), [GROUP]))


def test_an_encoding_is_idle_where_no_changes_are_sent() -> None:
    assert complaints("--update-weight-delta-encoding", "overwrite") == ""
    assert "no effect without --update-weight-mode delta" in complaints(
        "--update-weight-delta-encoding", "overwrite", mode="full"
    )


@pytest.mark.skipif(importlib.util.find_spec("blake3") is not None, reason="blake3 is installed: nothing to refuse")
def test_a_checksum_without_its_package_is_refused_before_the_run() -> None:
    assert "pip install blake3" in complaints("--update-weight-delta-checksum", "blake3")
