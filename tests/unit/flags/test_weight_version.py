"""Weight versions when the same command runs again."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.flags.checkpoint import VersionCount, version_before
from slime.utils.errors import DataError


def record_version(folder: Path, version: int, *, rollout_id: int) -> None:
    count = VersionCount()
    count.number, count.rollout_id = version - 1, rollout_id
    count.count(str(folder))


def next_version(folder: Path, start_rollout_id: int, *, given: int = 0, load: str | None = None) -> int:
    return version_before(start_rollout_id, (load, str(folder)), at_least=given) + 1


def test_weights_after_the_same_rollout_keep_their_version_and_others_get_a_new_one(tmp_path: Path) -> None:
    assert next_version(tmp_path, 3) == 4  # nothing was pushed yet
    record_version(tmp_path, 9, rollout_id=5)
    assert next_version(tmp_path, 6) == 9  # the checkpoint after rollout 5
    assert next_version(tmp_path, 5) == 10  # an earlier checkpoint: version 9 had weights that no checkpoint has
    assert next_version(tmp_path, 20) == 21
    assert next_version(tmp_path, 6, given=12) == 13  # a trainer restarted in the same job


def test_the_versions_of_the_run_that_is_loaded_do_not_come_again(tmp_path: Path) -> None:
    record_version(tmp_path / "a", 9, rollout_id=5)
    assert next_version(tmp_path / "b", 4, load=str(tmp_path / "a")) == 10


@pytest.mark.parametrize("content", ['{"version": 9}', '{"version": "9", "rollout": 1}', "{", "[]"])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    record_version(tmp_path, 9, rollout_id=5)
    file = tmp_path / "rollout" / "weight_version.json"
    file.write_text(content)
    with pytest.raises(DataError, match=rf"(?s){file}.*Remove it"):
        next_version(tmp_path, 6)
