"""Tokenizers, processors and images."""

import base64
import io
import json
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from slime.utils import env, processing_utils
from slime.utils.errors import ConfigError, DataError
from slime.utils.processing_utils import (
    as_rgb,
    build_processor_kwargs,
    compact_pixels,
    encode_image_for_rollout_engine,
    full_pixels,
    image_sources,
    load_processor,
    load_tokenizer,
    open_image,
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


def spellings(source):
    """Parts that some reader of messages takes for the image at ``source``."""
    yield from ({"type": kind, key: source} for kind in ("image", "image_url") for key in ("image", "image_url"))
    yield from ({key: source} for key in ("image", "image_url"))
    yield from ({"type": "text", "text": "", key: source} for key in ("image", "image_url"))
    yield from ({"type": "image", key: source} for key in ("url", "path", "base64"))
    yield from ({"type": "image_url", "image_url": {"url": source}}, {"image": {"path": source}})
    yield {"type": "input_image", "image_url": source}
    yield {"type": "tool_result", "content": [{"type": "image", "image": source}]}


@pytest.mark.parametrize("role", ["user", "tool"])
def test_every_spelling_of_an_image_is_opened_by_our_own_reader(tmp_path, role):
    path = tmp_path / "x.png"
    Image.new("RGB", (28, 28)).save(path)
    parts = list(spellings(str(path)))
    messages = [{"role": role, "content": [part]} for part in parts] + [{"role": role, "content": ["?"]}]
    found = process_vision_info(messages, None)
    assert [type(image) for image in found["images"]] == [Image.Image] * len(parts)
    assert image_sources(messages) == [str(path)] * len(parts)


@pytest.mark.parametrize("source", ["http://169.254.169.254/x", "https://127.0.0.1/x", "file:///etc/hostname"])
def test_no_spelling_of_an_image_leads_to_where_images_are_not(source):
    for part in spellings(source):
        with pytest.raises(DataError, match="not a public address|cannot be decoded|cannot be opened"):
            process_vision_info([{"role": "user", "content": [part]}], None)


@pytest.mark.parametrize("kind", ["video", "video_url", "audio", "input_audio"])
@pytest.mark.parametrize("is_typed", [True, False])
def test_videos_and_sounds_are_refused_however_they_are_spelt(kind, is_typed):
    part = {kind: ["http://127.0.0.1/x.png"]} | ({"type": kind} if is_typed else {})
    for content in ([part], [{"type": "tool_result", "content": [part]}]):
        with pytest.raises(DataError, match=f"a part of type {kind}; models see images alone"):
            process_vision_info([{"role": "user", "content": content}], None)


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


def test_a_torchvision_that_the_installation_hid_is_found(tmp_path):
    package = tmp_path / "vision" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    code = (
        f"import importlib.util, sys; sys.prefix = {str(tmp_path)!r}\n"
        "installed = importlib.util.find_spec('torchvision')\n"  # on a machine with a GPU
        "from slime.utils.processing_utils import import_torchvision\n"
        "assert import_torchvision(); import torchvision\n"
        "print('installed' if installed else torchvision.__file__)"
    )
    environment = env.copy() | {"PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() in ("installed", str(package / "__init__.py")), done.stderr


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


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["own.Own", None]}, ["own.Own", None]])
@pytest.mark.parametrize("own", ["Own", "TokenizersBackend"])
def test_a_tokenizer_that_is_not_the_folders_own_is_named(tmp_path, caplog, auto_map, own):
    vocabulary = WordLevel({"a": 0, "b": 1}, unk_token="b")
    Tokenizer(vocabulary).save(str(tmp_path / "tokenizer.json"))
    auto_map = json.loads(json.dumps(auto_map).replace("Own", own))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": auto_map}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert load_tokenizer(str(tmp_path), trust_remote_code=False).encode("a") == [0]
    said = [record.getMessage() for record in caplog.records if "--trust-remote-code" in record.getMessage()]
    if own == "TokenizersBackend":  # the class that is loaded anyway
        assert said == []
    else:
        (line,) = said
        assert str(tmp_path) in line and "own.Own" in line and "TokenizersBackend of transformers" in line


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def test_pixels_travel_as_bytes_where_nothing_is_lost():
    mean, std, unit = [0.5] * 3, [0.5] * 3, 1 / 255
    processor = SimpleNamespace(image_processor=SimpleNamespace(image_mean=mean, image_std=std, rescale_factor=unit))
    whole = torch.arange(256).reshape(4, 64)
    pixels = (whole - 127.5) / 127.5
    small = compact_pixels({"pixel_values": pixels, "image_grid_thw": 1}, processor)
    assert small["pixel_values"].dtype == torch.uint8 and torch.equal(small["pixel_values"], whole.byte())
    assert torch.equal(full_pixels(small), pixels)
    for other in (pixels + 1e-3, pixels * 1.5, whole, "pixels"):
        assert compact_pixels({"pixel_values": other}, processor)["pixel_values"] is other
    processor.image_processor.image_std = [0.5, 0.4, 0.5]
    assert compact_pixels({"pixel_values": pixels}, processor)["pixel_values"] is pixels


NOISE = Image.effect_noise((64, 48), 90)
FRAMES = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "cannot be decoded"),
        (b"not an image", "cannot be decoded"),
        (encoded(NOISE)[:-900], "cannot be decoded: .*Is it whole"),
        (encoded(NOISE, "JPEG")[:-900], "cannot be decoded: .*Is it whole"),
        (encoded(Image.new("1", (9_000, 9_000))), "has 9000 x 9000 pixels; 67108864 are allowed"),
        (encoded(Image.new("1", (20_000, 20_000))), "is too large"),
        (encoded(Image.new("CMYK", (4, 4)), "JPEG"), "is in CMYK; save it as one picture in RGB"),
        (encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "has 2 frames"),
        (encoded(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "has 2 frames"),
        (encoded(FRAMES[0], "TIFF", save_all=True, append_images=FRAMES[1:]), "has 2 frames"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be decoded"),
        ("data:image/png;base64,@@@", "is no base64"),
        ("no/such.png", "'no/such.png' of a prompt cannot be opened"),
        ("a\0.png", "of a prompt cannot be opened"),
        ("\ud800.png", "of a prompt cannot be opened"),
        ("/dev/null", "'/dev/null' of a prompt cannot be opened"),  # others of its kind never end
        ("http://[x/y.png", "cannot be fetched"),
        (7, "An image of a prompt is '7'; it must be"),
        ({"format": "processor_output"}, "An image of a prompt is .{'format': 'processor_output'}.; it must be"),
    ],
)
def test_an_image_that_cannot_be_used_is_refused(source, message):
    with pytest.raises(DataError, match=message):
        open_image(source)


def test_of_the_pictures_that_a_phone_puts_into_one_jpeg_the_first_is_taken():
    photo, preview = FRAMES
    taken = open_image(encoded(photo, "MPO", save_all=True, append_images=[preview.resize((2, 2))]))
    assert taken.mode == "RGB" and taken.size == photo.size
    assert taken.getpixel((0, 0))[0] > 200


def half_red(mode: str) -> Image.Image:
    """Two pixels: one red, one transparent over black."""
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    if mode == "P":
        image = image.convert("RGB").quantize(4)
        image.info["transparency"] = image.getpixel((1, 0))
    elif mode == "RGB":
        image = image.convert("RGB")
        image.info["transparency"] = (0, 0, 0)
    return image.convert(mode)


def pixels(image: Image.Image) -> list[tuple[int, ...]]:
    assert image.mode == "RGB"
    return [image.getpixel((x, y)) for y in range(image.height) for x in range(image.width)]


@pytest.mark.parametrize(
    ("mode", "kind", "first"),
    [
        ("RGBA", "PNG", (255, 0, 0)),
        ("RGBA", "WEBP", (255, 0, 0)),
        ("RGBA", "TIFF", (255, 0, 0)),
        ("LA", "PNG", (76, 76, 76)),
        ("P", "PNG", (255, 0, 0)),
        ("P", "GIF", (255, 0, 0)),
        ("RGB", "PNG", (255, 0, 0)),
        ("RGBa", None, (255, 0, 0)),
    ],
)
def test_what_is_transparent_is_white(mode, kind, first):
    image = half_red(mode)
    options = {"lossless": True} if kind == "WEBP" else {}
    if "transparency" in image.info:
        options["transparency"] = image.info["transparency"]
    sources = [image] if kind is None else [image, encoded(image, kind, **options)]
    for source in sources:
        assert pixels(open_image(source)) == [first, (255, 255, 255)]
    for seen in (
        build_processor_kwargs({"images": [image]})["images"][0],
        open_image(encode_image_for_rollout_engine(image)),
    ):
        assert pixels(seen) == [first, (255, 255, 255)]


def test_half_transparent_is_half_white():
    assert pixels(open_image(Image.new("RGBA", (1, 1), (255, 0, 0, 127)))) == [(255, 128, 128)]


def test_sixteen_bits_are_scaled_and_not_cut():
    image = Image.fromarray(np.array([[0, 0x1234, 0x8000, 0xFFFF]], dtype=np.uint16))
    wanted = [(grey,) * 3 for grey in (0, 0x12, 0x80, 0xFF)]
    assert image.mode.startswith("I;16")
    for source in (image, encoded(image), encoded(image, "TIFF")):
        assert pixels(open_image(source)) == wanted


def test_a_photo_is_upright():
    photo = Image.new("RGB", (2, 1), "red")
    photo.putpixel((1, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # turn it clockwise
    for source in (encoded(photo, exif=exif), Image.open(io.BytesIO(encoded(photo, exif=exif)))):
        upright = open_image(source)
        assert upright.size == (1, 2) and pixels(upright) == [(255, 0, 0), (0, 0, 255)]
        assert pixels(open_image(encode_image_for_rollout_engine(upright))) == pixels(upright)


@pytest.mark.parametrize("mode", ["CMYK", "I", "F"])
def test_a_mode_without_a_plain_picture_is_refused(mode):
    with pytest.raises(DataError, match=f"is in {mode}; save it as one picture in RGB"):
        open_image(Image.new(mode, (2, 1)))


def test_an_image_that_is_as_it_must_be_stays_the_same_object():
    assert as_rgb(NOISE.convert("RGB").copy()).mode == "RGB"
    image = Image.new("RGB", (2, 1))
    assert as_rgb(image) is image and as_rgb("img") == "img"


def test_an_image_may_be_a_path_bytes_base64_or_a_dict(tmp_path):
    data = encoded(NOISE)
    (tmp_path / "x.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    assert len(text) > 4096
    for source in (
        str(tmp_path / "x.png"),
        data,
        text,
        f"data:image/png;base64,{text}",
        {"bytes": data, "path": None},
    ):
        image = open_image(source)
        assert image.mode == "RGB" and image.size == (64, 48)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "2130706433"]
)
def test_no_request_goes_to_an_address_that_is_not_public(host):
    with pytest.raises(DataError, match="is not a public address|cannot be fetched"):
        open_image(f"http://{host}:1/x.png")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "answers 404"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n", "answers 302"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(300), "bytes so far; 100 in"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\nhalf", "cannot be decoded|cannot be fetched"),
        (b"junk", "cannot be fetched"),
    ],
)
def test_what_a_server_sends_is_bounded_and_checked(answer, message, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            with server.accept()[0] as client:
                client.recv(4096)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setattr(
            processing_utils, "_public_connection", lambda address, *_: socket.create_connection(address, 5)
        )
        monkeypatch.setattr(processing_utils, "MAX_IMAGE_BYTES", 100)
        with pytest.raises(DataError, match=message):
            open_image(f"http://127.0.0.1:{port}/x.png?a=1")
        thread.join(5)
