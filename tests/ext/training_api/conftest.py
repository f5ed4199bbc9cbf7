from __future__ import annotations

from pathlib import Path

import pytest

from slime.utils.torchvision_package import import_torchvision

import_torchvision()  # before transformers looks for it: peft and tiny_qwen3

from tests.e2e.tiny_qwen3 import save_tiny_model  # noqa: E402


@pytest.fixture(scope="package")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_model(folder, 1)
    return folder
