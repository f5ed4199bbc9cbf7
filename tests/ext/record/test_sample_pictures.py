"""Small copies of images in recorded samples: bounds, no duplicates in a file, and what a report may show of a
file."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from slime.ext.record.sample_pictures import MAX_BYTES, MAX_PICTURES, SIDE, picture_url, small_copy
from slime.utils.types import Sample
from tests.ext.record import recording


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.effect_noise((width, height), 120).convert(mode)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(
    ("size", "small"),
    [
        ((1920, 1080), (SIDE, 108)),
        ((1, 1), (1, 1)),
        ((1, 60_000), (1, SIDE)),
        ((60_000, 3), (SIDE, 1)),
        ((SIDE, SIDE), (SIDE, SIDE)),
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "P", "CMYK"])
def test_a_copy_is_small_whatever_the_picture_is(size: tuple[int, int], small: tuple[int, int], mode: str) -> None:
    data = small_copy(noise(*size, "RGB").convert(mode))
    assert data is not None and len(data) <= MAX_BYTES and opened(data).size == small
    assert picture_url(data) is not None


def test_a_drawn_picture_keeps_its_colours_and_is_not_changed_itself() -> None:
    image = Image.new("RGB", (96, 96), (250, 10, 30))
    data = small_copy(image)
    assert data is not None and opened(data).format == "PNG" and opened(data).getpixel((40, 40)) == (250, 10, 30)
    assert image.size == (96, 96)


def test_what_is_no_picture_has_no_copy() -> None:
    whole = io.BytesIO()
    noise(300, 300).save(whole, "PNG")
    cut = Image.open(io.BytesIO(whole.getvalue()[:2000]))
    assert [small_copy(one) for one in ("picture.png", b"\x89PNG", None, cut)] == [None] * 4


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG file of a few bytes that claims these sizes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "data",
    [
        png_of(60_000, 60_000, zlib.compress(b"\0" * 1000)),
        png_of(2**31 - 1, 2**31 - 1),
        png_of(8, 8, b"no zlib"),
        b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
        b"",
        b"\xff\xd8\xff" + b"\0" * MAX_BYTES,
    ],
)
def test_bytes_that_are_no_small_picture_are_not_shown(data: bytes) -> None:
    assert picture_url(data) is None


def sample_with(images: list[Any], group: int) -> Sample:
    return Sample(
        group_index=group, index=group, prompt="p", tokens=[1], response_length=1,
        multimodal_inputs={"images": images}, status=Sample.Status.COMPLETED,
    )  # fmt: skip


def record(folder: Path, samples: list[Sample]) -> list[dict[str, Any]]:
    recording.start(Namespace(save=str(folder), value_origins={}), "rollout manager", primary=True)
    recording.rollout(0, samples, None)
    recording.evaluation(0, {"held_out": {"samples": samples[:1]}})
    recording.stop()
    (row,) = pq.read_table(folder / "samples/eval_000000.parquet").to_pylist()
    assert row["pictures"] == [small_copy(one) for one in samples[0].multimodal_inputs["images"]][:MAX_PICTURES]
    return pq.read_table(folder / "samples/rollout_000000.parquet").to_pylist()


def test_a_picture_is_stored_once_and_named_by_every_sample_that_has_it(tmp_path: Path) -> None:
    first, second, of_tool = noise(300, 200), noise(100, 100), noise(64, 64)
    groups = [[first, second], [first.copy(), second, of_tool], [second], ["a path", first]]
    rows = record(tmp_path, [sample_with(images, i) for i, images in enumerate(groups)])
    ids = [row["picture_ids"] for row in rows]
    assert len(set(ids[0])) == 2 and ids[1][:2] == ids[0] and ids[2] == ids[0][1:] and ids[3] == ids[0][:1]
    assert [[data is not None for data in row["pictures"]] for row in rows] == [
        [True, True],
        [False, False, True],
        [False],
        [False],
    ]
    assert rows[1]["pictures"][2] == small_copy(of_tool)


def test_a_prompt_of_messages_is_recorded_without_its_pixels(tmp_path: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"x" * 9000).decode()
    parts = [
        {"type": "image", "image": b"\x89PNG" * 1000},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "image": "pictures/1.png"},
        {"type": "text", "text": "What is this? " * 500},
    ]
    sample = sample_with([], 0)
    sample.prompt = [{"role": "user", "content": parts}]
    (row,) = record(tmp_path, [sample])
    (message,) = json.loads(row["prompt"])
    assert message["content"][0]["image"] == "(bytes)"
    assert message["content"][1]["image_url"] == {"url": f"({len(url)} characters)"}
    assert message["content"][2:] == parts[2:]
    assert parts[1]["image_url"] == {"url": url}
