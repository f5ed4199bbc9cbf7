"""Fixtures that several files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slime.backends.sglang_utils import cpu_shim
from tests.loaded_model.engine import LoadedModel
from tests.matrix.case import load_cases


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """A loaded model that tests replace by their own, which saves a start."""
    cpu_shim.install()
    folder = tmp_path_factory.mktemp("first")
    load_cases(["qwen3"])["qwen3"].write_checkpoint(folder)
    with LoadedModel(folder) as loaded:
        yield loaded
