"""Pictures of recorded samples: small copies in the samples' files, and what a report may show of them.

A copy has at most ``SIDE`` pixels along a side and ``MAX_BYTES``, a sample at most ``MAX_PICTURES``; a picture is
stored in the first row of a file that has it.  Replays do not read them.
"""

from __future__ import annotations

import base64
import hashlib
import io
from typing import Any

from slime.utils.processing_utils import as_rgb
from slime.utils.types import Sample

SIDE = 192
MAX_BYTES = 16 << 10
MAX_PICTURES = 8
QUALITIES = (85, 50, 20)
"""Of JPEG, tried until a copy is small enough."""
FORMATS = ("JPEG", "PNG")


class SmallCopies:
    """The pictures of one file's rows."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str, bytes | None]] = {}
        """By ``id``: the picture itself, so that the number stays its own, and its copy, until a row has it."""
        self._stored: set[str] = set()

    def columns(self, sample: Sample) -> dict[str, list[Any]]:
        """Return ``picture_ids`` of a sample, and ``pictures``: bytes, None for those that an earlier row has."""
        images = (sample.multimodal_inputs or {}).get("images")
        ids: list[str] = []
        copies: list[bytes | None] = []
        for image in list(images)[:MAX_PICTURES] if isinstance(images, list | tuple) else ():
            if id(image) not in self._known:
                data = small_copy(image)
                name = hashlib.blake2b(data, digest_size=8).hexdigest() if data else ""
                self._known[id(image)] = (image, name, data)
            _, name, data = self._known[id(image)]
            if name:
                ids.append(name)
                copies.append(None if name in self._stored else data)
                self._stored.add(name)
        return {"picture_ids": ids, "pictures": copies}


def small_copy(image: Any) -> bytes | None:
    """Return a small copy of a PIL image as JPEG, or as PNG where that is smaller; None where there can be none."""
    from PIL import Image

    if not isinstance(image, Image.Image):
        return None
    scale = min(1.0, SIDE / max(image.size))
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    try:
        plain = image if image.mode == "L" else as_rgb(image)
        small = plain.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)
        found = [_encoded(small, format="PNG", optimize=True)]
        for quality in QUALITIES:
            found.append(_encoded(small, format="JPEG", quality=quality))
            if len(found[-1]) <= MAX_BYTES:
                break
    except (OSError, ValueError, SyntaxError):  # a picture that cannot be decoded: other parts of the job say so
        return None
    best = min(found, key=len)
    return best if len(best) <= MAX_BYTES else None


def _encoded(image: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()


def picture_url(data: bytes) -> str | None:
    """Return a ``data:`` URL of a recorded picture; None for bytes that are no small JPEG or PNG.

    A record may come from anybody: of a few bytes a browser could make gigabytes of pixels.
    """
    from PIL import Image

    if len(data) > MAX_BYTES:
        return None
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if max(image.size) > SIDE or getattr(image, "n_frames", 1) != 1:
                return None
            kind = str(image.format).lower()
            image.load()
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError):
        return None
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
