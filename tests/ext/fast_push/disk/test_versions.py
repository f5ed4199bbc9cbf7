"""An index of a weight version that another program wrote, or that is damaged."""

from __future__ import annotations

import json

import pytest

from slime.ext.fast_push.disk.versions import read_version
from tests.unit.utils.test_hostile_input import ODD, one_line


@pytest.mark.parametrize("value", [None, *ODD.values(), ""])
@pytest.mark.parametrize("key", ["metadata", "base_version", "version", "delta_encoding", "compression_format"])
def test_a_weight_version_whose_index_says_something_else_is_refused(key, value, tmp_path):
    folder = tmp_path / "weight_v000001"
    folder.mkdir()
    told = {
        "delta_encoding": "xor",
        "base_version": 0,
        "version": 1,
        "checksum_format": "xxh3",
        "compression_format": "zstd",
    }
    index = {"metadata": value} if key == "metadata" else {"metadata": told | {key: value}}
    if (key, value) in (("metadata", {"a": 1}), ("version", 1.5), ("version", True)):
        return
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "weight_v000001" in one_line(lambda: read_version(folder))
