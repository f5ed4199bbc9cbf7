"""Tokenizers, processors and images."""

import base64
import io
import json
import subprocess
import sys

import pytest
from PIL import Image

from slime.utils import env
from slime.utils.errors import ConfigError, DataError
from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
    load_tokenizer,
    process_vision_info,
)
from tests.contracts.source_tree import REPO


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"No tokenizer can be loaded from '{tmp_path}'.*--hf-checkpoint"):
        load_tokenizer(str(tmp_path))


def test_a_text_model_has_no_processor(tmp_path):
    assert load_processor(str(tmp_path)) is None


def test_processor_arguments_keep_ids_as_lists():
    kwargs = build_processor_kwargs({"images": ["x"], "images_kwargs": {"size": 3}})
    assert kwargs["images"] == ["x"]
    assert kwargs["images_kwargs"] == {"size": 3, "return_tensors": "pt"}
    assert kwargs["text_kwargs"] == {"return_tensors": None, "return_mm_token_type_ids": False}
    assert build_processor_kwargs(None)["videos_kwargs"] == {"return_tensors": "pt"}


def test_an_image_travels_as_a_png_and_comes_back(tmp_path):
    image = Image.new("RGB", (2, 1), (255, 0, 0))
    url = encode_image_for_rollout_engine(image)
    assert url.startswith("data:image/png;base64,")
    decoded = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert decoded.tobytes() == image.tobytes()

    path = tmp_path / "x.png"
    image.save(path)
    content = [{"type": "image", "image": source} for source in (url, str(path), image, path.read_bytes())]
    found = process_vision_info([{"role": "user", "content": [*content, {"type": "text", "text": "?"}]}], None)
    assert [one.tobytes() for one in found["images"]] == [image.tobytes()] * 4
    assert found["videos"] is None


def test_text_has_no_images_and_bad_images_are_named():
    assert process_vision_info([{"role": "user", "content": "hi"}], None) == {"images": None, "videos": None}
    with pytest.raises(DataError, match="'no.png' of a prompt cannot be opened"):
        process_vision_info([{"role": "user", "content": [{"type": "image", "image": "no.png"}]}], None)
    with pytest.raises(DataError, match="qwen_vl_utils"):
        process_vision_info([{"role": "user", "content": [{"type": "video", "video": "x.mp4"}]}], None)


def run_beside_torchvision(tmp_path, source: str) -> str:
    """What a new process prints that imports a torchvision of this source."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    code = "from slime.utils.processing_utils import import_torchvision; print(import_torchvision())"
    environment = env.copy() | {"PYTHONPATH": f"{tmp_path}:{REPO}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def test_a_torchvision_made_for_another_torch_is_imported_without_its_kernels(tmp_path):
    # As torchvision does when its compiled part could not be loaded; it raises for an operator that nobody declares.
    source = "import torch\n@torch.library.register_fake('torchvision::nms')\ndef nms(*_): return None\n"
    assert run_beside_torchvision(tmp_path, source) == "True"


def test_a_torchvision_that_cannot_be_mended_counts_as_none(tmp_path):
    assert run_beside_torchvision(tmp_path, "raise OSError('libcudart.so.13 is missing')\n") == "False"


@pytest.fixture
def folder_with_code(tmp_path):
    """A model's folder whose tokenizer is a class of its own, which leaves a mark when it is imported."""
    mark = tmp_path / "mark"
    (tmp_path / "own.py").write_text(
        f"from pathlib import Path\nfrom transformers import PreTrainedTokenizer\nPath({str(mark)!r}).touch()\n"
        "class Own(PreTrainedTokenizer):\n"
        "    vocab_size = 2\n"
        "    def get_vocab(self):\n        return {'a': 0, 'b': 1}\n"
    )
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"auto_map": {"AutoProcessor": "own.Own"}}))
    return tmp_path


@pytest.mark.parametrize("load", [load_tokenizer, load_processor])
def test_code_of_a_models_folder_runs_only_when_it_is_trusted(folder_with_code, load):
    with pytest.raises(ConfigError, match="Python code of its own.*--trust-remote-code"):
        load(str(folder_with_code), trust_remote_code=False)
    assert not (folder_with_code / "mark").exists()


def test_code_of_a_folder_that_is_trusted_runs(folder_with_code, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder_with_code / "cache"))
    assert type(load_tokenizer(str(folder_with_code), trust_remote_code=True)).__name__ == "Own"
    assert (folder_with_code / "mark").exists()
