"""Tokenizers, processors and images."""

import base64
import io
import json
import socket
import threading
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from slime.utils import processing_utils
from slime.utils.errors import ConfigError, DataError
from slime.utils.processing_utils import (
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


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"No tokenizer can be loaded from '{tmp_path}'.*--hf-checkpoint"):
        load_tokenizer(str(tmp_path))


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


def spellings(source):
    """Message parts that some reader takes for the image at ``source``."""
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
        with pytest.raises(DataError, match=f"a part of type {kind}; models take only images"):
            process_vision_info([{"role": "user", "content": content}], None)


@pytest.fixture
def folder_with_code(tmp_path):
    """A model folder with a custom tokenizer class, which leaves a mark when it is imported."""
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
    with pytest.raises(ConfigError, match="contains Python code.*--trust-remote-code"):
        load(str(folder_with_code), trust_remote_code=False)
    assert not (folder_with_code / "mark").exists()


def test_code_of_a_folder_that_is_trusted_runs(folder_with_code, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder_with_code / "cache"))
    assert type(load_tokenizer(str(folder_with_code), trust_remote_code=True)).__name__ == "Own"
    assert (folder_with_code / "mark").exists()


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
        (encoded(NOISE)[:-900], "cannot be decoded: .*Is it complete"),
        (encoded(NOISE, "JPEG")[:-900], "cannot be decoded: .*Is it complete"),
        (encoded(Image.new("1", (9_000, 9_000))), "has 9000 x 9000 pixels; 67108864 are allowed"),
        (encoded(Image.new("1", (20_000, 20_000))), "is too large"),
        (encoded(Image.new("CMYK", (4, 4)), "JPEG"), "is in CMYK; save it as one picture in RGB"),
        (encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "has 2 frames"),
        ("data:image/png;base64,@@@", "is not base64"),
        ("no/such.png", "'no/such.png' of a prompt cannot be opened"),
        ("\ud800.png", "of a prompt cannot be opened"),
        ("/dev/null", "'/dev/null' of a prompt cannot be opened"),  # similar devices never end
        ("http://[x/y.png", "cannot be fetched"),
        (7, "An image of a prompt is '7'; it must be"),
        ({"format": "processor_output"}, "An image of a prompt is .{'format': 'processor_output'}.; it must be"),
    ],
)
def test_an_image_that_cannot_be_used_is_refused(source, message):
    with pytest.raises(DataError, match=message):
        open_image(source)


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
        ("LA", "PNG", (76, 76, 76)),
        ("P", "PNG", (255, 0, 0)),
        ("RGB", "PNG", (255, 0, 0)),
    ],
)
def test_what_is_transparent_is_white(mode, kind, first):
    image = half_red(mode)
    options = {}
    if "transparency" in image.info:
        options["transparency"] = image.info["transparency"]
    sources = [image, encoded(image, kind, **options)]
    for source in sources:
        assert pixels(open_image(source)) == [first, (255, 255, 255)]
    for seen in (
        build_processor_kwargs({"images": [image]})["images"][0],
        open_image(encode_image_for_rollout_engine(image)),
    ):
        assert pixels(seen) == [first, (255, 255, 255)]


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
