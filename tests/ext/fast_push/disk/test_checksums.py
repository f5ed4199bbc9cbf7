"""Checksums against their known values."""

from __future__ import annotations

import importlib.util

import pytest

from slime.ext.fast_push.disk.delta import new_checksum
from slime.utils.errors import ConfigError


def checksum_of(name: str, data: bytes) -> str:
    checksum = new_checksum(name)
    checksum.update(data)
    return checksum.hexdigest()


def test_known_values():
    assert checksum_of("xxh3-128", b"") == "99aa06d3014798d86001c324468d497f"  # the XXH128 of nothing, seed 0
    assert checksum_of("adler32", b"Wikipedia") == "11e60398"


def test_an_unknown_checksum_names_those_that_exist():
    with pytest.raises(ConfigError, match="--update-weight-delta-checksum is 'md5'; there are xxh3-128, blake3"):
        new_checksum("md5")


def test_blake3_works_or_says_what_to_install():
    if importlib.util.find_spec("blake3") is None:
        with pytest.raises(ConfigError, match="pip install blake3, or use xxh3-128"):
            new_checksum("blake3")
    else:
        assert checksum_of("blake3", b"").startswith("af1349b9f5f9a1a6a0404dea36dcc949")
