"""Tokenizers, processors and images."""

import base64
import io
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
