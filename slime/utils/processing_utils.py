"""Loads a model's tokenizer and processor, and prepares images.

transformers, PIL and qwen_vl_utils are imported by the functions that need them.
"""

from __future__ import annotations

import base64
import http.client
import io
import ipaddress
import logging
import socket
import struct
import time
import urllib.parse
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.utils.errors import ConfigError, DataError
from slime.utils.torchvision_package import import_torchvision

if TYPE_CHECKING:
    from slime.utils.types import Sample

logger = logging.getLogger(__name__)

DEFAULT_PATCH_SIZE = 14
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Accepted image formats; PIL's other formats run external programs or are rare and old."""
MAX_IMAGE_PIXELS = 1 << 26
MAX_IMAGE_BYTES = 1 << 26
IMAGE_TIMEOUT_S = 20.0
MAX_PATH = 4096
"""Maximum characters of a path; a longer text is taken as base64."""
IMAGE_NAMES = ("image", "image_url", "input_image")
"""Types of message parts that are images; also the keys of their sources."""
NOT_SEEN = ("video", "video_url", "input_video", "audio", "audio_url", "input_audio")
"""The same for parts that no model here accepts."""
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys with which a part may set its image's size."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def load_tokenizer(path: str, **kwargs: Any) -> Any:
    """Return the tokenizer of a Hugging Face folder or hub name; ``kwargs`` go to ``AutoTokenizer.from_pretrained``.

    Raises:
        ConfigError: the tokenizer is missing or cannot be read.
    """
    _has_processor(path)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, **kwargs)
    except (OSError, ValueError, KeyError) as error:
        _refuse_remote_code(path, error, trusted=bool(kwargs.get("trust_remote_code")))
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"No tokenizer can be loaded from {path!r} ({type(error).__name__}: {reason}). "
            "It must hold tokenizer.json and tokenizer_config.json; set --hf-checkpoint to such a folder."
        ) from error


def _refuse_remote_code(path: str, error: Exception, *, trusted: bool) -> None:
    """Raise ConfigError if transformers failed because the folder's own code would have to run."""
    config = Path(path) / "tokenizer_config.json"  # transformers may have tried its own class of the same name
    brings_code = config.is_file() and "auto_map" in config.read_text(encoding="utf-8", errors="replace")
    if "trust_remote_code" in str(error) or (brings_code and not trusted):
        raise ConfigError(
            f"{path} contains Python code that this job would have to run. Read it, and add --trust-remote-code if "
            "you trust it; or use a folder whose files transformers reads without it."
        ) from error


def _has_processor(path: str) -> bool:
    """Return False for a folder without a processor; otherwise import torchvision and return True.

    transformers checks for torchvision once, as early as when its tokenizers are imported.
    """
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in PROCESSOR_FILES):
        return False
    import_torchvision()
    return True


def load_processor(path: str, **kwargs: Any) -> Any | None:
    """Return a multimodal model's processor; None if the model has none.

    If the processor's dependencies are missing, logs a warning and returns None, so that text-only training works.
    """
    if not _has_processor(path):
        return None
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(path, **kwargs)
    except (OSError, ValueError) as error:
        _refuse_remote_code(path, error, trusted=bool(kwargs.get("trust_remote_code")))
        logger.info("No processor in %s: %s", path, error)
        return None
    except ImportError as error:
        logger.warning("Not using the processor of %s, because a dependency is not installed: %s", path, error)
        return None
    if not isinstance(processor, ProcessorMixin):
        return None
    return processor


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Return arguments for ``processor(text=..., **kwargs)``: ids as lists, the rest as tensors, RGB images."""
    kwargs = dict(multimodal_inputs or {})
    if kwargs.get("images"):
        kwargs["images"] = [as_rgb(image) for image in kwargs["images"]]
    forced: dict[str, dict[str, Any]] = {
        "text_kwargs": {"return_tensors": None, "return_mm_token_type_ids": False},
        "audio_kwargs": {"return_tensors": "pt"},
        "images_kwargs": {"return_tensors": "pt"},
        "videos_kwargs": {"return_tensors": "pt"},
    }
    for name, values in forced.items():
        kwargs[name] = {**(kwargs.get(name) or {}), **values}
    return kwargs


def process_text(
    text: str, multimodal_inputs: dict[str, Any] | None, processor: Any
) -> tuple[list[int], dict[str, Any]]:
    """Return the ids of a text with images, and the processor's other outputs, which go to the trainer."""
    outputs = processor(text=text, **build_processor_kwargs(multimodal_inputs))
    ids = outputs["input_ids"].tolist() if hasattr(outputs["input_ids"], "tolist") else list(outputs["input_ids"])
    train_inputs = {k: v for k, v in outputs.items() if k not in ("input_ids", "attention_mask")}
    return list(ids[0]) if ids and isinstance(ids[0], list) else ids, compact_pixels(train_inputs, processor)


def one_id_an_image(input_ids: Sequence[int], image_token: int) -> list[int]:
    """Collapse each image's ids to a single one, as engines expect; their processor expands it again."""
    before = [None, *input_ids[:-1]]
    return [token for token, last in zip(input_ids, before, strict=True) if not token == last == image_token]


def check_image_tokens(name: str, payload: Mapping[str, Any], meta_info: Mapping[str, Any], num_tokens: int) -> None:
    """Check that the engine expanded the images of ``payload`` to as many tokens as the trainer.

    Raises:
        DataError: the numbers differ.
    """
    counted, was_aborted = meta_info.get("prompt_tokens"), meta_info["finish_reason"].get("type") == "abort"
    if payload.get("image_data") and counted and counted != num_tokens and not was_aborted:
        raise DataError(
            f"{name} with {len(payload['image_data'])} images has {num_tokens} tokens, but {counted} in the engine: "
            "its processor produces another image size. Both read the processor's files in --hf-checkpoint; check "
            "SGLANG_IMAGE_MAX_PIXELS and the size of the images."
        )


def compact_pixels(inputs: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Return a processor's outputs with ``pixel_values`` as uint8, a quarter of the memory, if that is lossless.

    ``pixel_range`` is added for :func:`full_pixels`.  Pixels stay unchanged unless they are bytes with the same shift
    and scale in all channels.
    """
    import torch

    pixels, images = inputs.get("pixel_values"), getattr(processor, "image_processor", None)
    mean, std = (set(getattr(images, name, None) or ()) for name in ("image_mean", "image_std"))
    if not isinstance(pixels, torch.Tensor) or not pixels.is_floating_point() or len(mean) != 1 or len(std) != 1:
        return inputs
    unit = 1.0 / (getattr(images, "rescale_factor", None) or 1 / 255)
    limits = torch.tensor([mean.pop() * unit, std.pop() * unit])
    whole = (pixels * limits[1] + limits[0]).round().clamp(0, 255).to(torch.uint8)
    small = {**inputs, "pixel_values": whole, "pixel_range": limits}
    return small if torch.equal(full_pixels(small), pixels) else inputs


def full_pixels(inputs: Mapping[str, Any]) -> Any:
    """Return ``pixel_values`` as the processor produced them, on their current device."""
    pixels = inputs["pixel_values"]
    if "pixel_range" not in inputs:
        return pixels
    shift, scale = inputs["pixel_range"].tolist()
    return pixels.float().sub_(shift).div_(scale)


def join_images(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> dict[str, Any]:
    """Concatenate the processor's outputs of two sets of images that were processed separately."""
    import torch

    if not first or not second:
        return dict(first or second or {})
    both = "pixel_range" in first and "pixel_range" in second
    if not both:
        first, second = (
            {key: full_pixels(part) if key == "pixel_values" else value for key, value in part.items()}
            for part in (first, second)
        )
    joined = {key: torch.cat([first[key], second[key]]) for key in second if key != "pixel_range"}
    return {**joined, "pixel_range": second["pixel_range"]} if both else joined


def process_vision_info(prompt: Sequence[dict[str, Any]], processor: Any) -> dict[str, Any]:
    """Return ``{"images": [...] | None, "videos": None}`` for the images in chat messages, in order.

    If installed, qwen_vl_utils resizes images to multiples of the patch size.  It would open paths and fetch URLs
    itself, so it gets only opened images.

    Raises:
        DataError: an image is unusable (see :func:`open_image`), or there is a video or audio part.
    """
    found = [(part, open_image(_source(part))) for part in _image_parts(prompt)]
    if not found:
        return {"images": None, "videos": None}
    try:
        from qwen_vl_utils import process_vision_info as qwen_process_vision_info
    except ImportError:
        return {"images": [image for _, image in found], "videos": None}
    content = [
        {"type": "image", "image": image} | {name: part[name] for name in SIZES if isinstance(part.get(name), int)}
        for part, image in found
    ]
    image_processor = getattr(processor, "image_processor", None)
    patch_size = getattr(image_processor, "patch_size", None) or DEFAULT_PATCH_SIZE
    images, _ = qwen_process_vision_info([{"role": "user", "content": content}], image_patch_size=patch_size)
    return {"images": images, "videos": None}


def media_of(sample: Sample) -> list[Any]:
    """Return a sample's images and videos, in order."""
    lists = (sample.multimodal_inputs or {}).values()
    return [item for items in lists if isinstance(items, (list, tuple)) for item in items]


def image_sources(prompt: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the sources of images in chat messages, in order: paths, URLs, bytes.

    Raises:
        DataError: there is a video or audio part.
    """
    return [_source(part) for part in _image_parts(prompt)]


def _image_parts(prompt: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for holder in prompt:
        content = holder.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping):
                continue
            if unseen := _first_name(part, NOT_SEEN):
                raise DataError(f"A message has a part of type {unseen}; models take only images. Remove it.")
            if _first_name(part, IMAGE_NAMES):
                yield part
            else:
                yield from _image_parts([part])


def _first_name(part: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of ``names`` that is the part's type or a key with a value."""
    return next((name for name in names if part.get("type") == name or part.get(name) is not None), None)


def _source(part: Mapping[str, Any]) -> Any:
    return _unwrapped(next((part[name] for name in IMAGE_NAMES if part.get(name) is not None), part))


def _unwrapped(source: Any) -> Any:
    if not isinstance(source, Mapping):
        return source
    return next((source[key] for key in ("bytes", "path", "url", "base64") if source.get(key)), source)


def as_rgb(image: Any) -> Any:
    """Convert a PIL image to 8-bit RGB, rotated by its EXIF data, with transparency on white.

    Images that need no conversion, and other objects, are returned unchanged.
    """
    from PIL import ExifTags, Image, ImageOps

    if not isinstance(image, Image.Image):
        return image
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        import numpy as np

        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        picture = image.convert("RGBA")
        image = Image.new("RGBA", picture.size, "white")
        image.alpha_composite(picture)
    return image if image.mode == "RGB" else image.convert("RGB")


def open_image(source: Any) -> Any:
    """Open and decode an image; return a PIL image in RGB (see :func:`as_rgb`).

    Args:
        source: a path; a ``file:``, ``data:``, ``http:`` or ``https:`` URL; bytes; base64; an image; or a dict with
            one of these under ``bytes``, ``path``, ``url`` or ``base64``.

    Raises:
        DataError: the image cannot be read, is damaged or truncated, of an unknown format, animated, too large, or of
            an unsupported mode (CMYK, 32 bits per pixel).
    """
    from PIL import Image

    source = _unwrapped(source)
    is_open = isinstance(source, Image.Image)
    name, data = ("(an object of PIL)", b"") if is_open else _image_data(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = source if is_open else Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
            if image.width * image.height > MAX_IMAGE_PIXELS:
                raise DataError(
                    f"The image {name} of a prompt has {image.width} x {image.height} pixels; {MAX_IMAGE_PIXELS} are "
                    "allowed. Make it smaller."
                )
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # MPO: a JPEG, then its previews
            if frames != 1 or image.mode in ("CMYK", "I", "F"):
                what = f"has {frames} frames" if frames != 1 else f"is in {image.mode}"
                raise DataError(f"The image {name} of a prompt {what}; save it as one picture in RGB.")
            image.load()
            return as_rgb(image).convert("RGB")  # a copy that does not refer to the file
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"The image {name} of a prompt cannot be decoded: {error}. Is it complete?") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"The image {name} of a prompt is too large: {error}") from error


def _image_data(source: Any) -> tuple[str, bytes]:
    """Return a name for messages, and the file's bytes."""
    if isinstance(source, (bytes, bytearray)):
        return f"({len(source)} bytes)", bytes(source)
    if not isinstance(source, str):
        raise DataError(f"An image of a prompt is {str(source)[:80]!r}; it must be a path, a URL, bytes or base64.")
    name = repr(source[:80])
    if source.startswith(("http://", "https://")):
        return name, _fetched(source)
    is_url = source.startswith("data:")
    if is_url or (len(source) > MAX_PATH and not source.startswith("file://")):
        try:
            return name, base64.b64decode(source.partition(",")[2] if is_url else source, validate=True)
        except ValueError as error:
            raise DataError(f"The image {name} of a prompt is not base64: {error}.") from error
    path = Path(source.removeprefix("file://"))
    try:
        if not path.is_file():  # reading a device or a pipe may never end
            raise DataError(f"The image {name} of a prompt cannot be opened: there is no such file.")
        if (size := path.stat().st_size) > MAX_IMAGE_BYTES:
            raise DataError(f"The image {name} of a prompt has {size} bytes; {MAX_IMAGE_BYTES} are allowed.")
        return name, path.read_bytes()
    except OSError as error:
        raise DataError(f"The image {name} of a prompt cannot be opened: {error}.") from error


def _fetched(url: str) -> bytes:
    """Fetch ``url`` from a web server; redirects are not followed.

    Raises:
        DataError: the host is, or resolves to, a non-public address; or the server sends an error or too much, or is
            too slow.
    """
    deadline_s = time.monotonic() + IMAGE_TIMEOUT_S
    try:
        parts = urllib.parse.urlsplit(url)
        connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = connection_class(parts.hostname or "", parts.port, timeout=IMAGE_TIMEOUT_S)
        # Connects to the address that was checked: a second lookup might return another one.
        setattr(connection, "_create_connection", _public_connection)  # noqa: B010
        with closing(connection):
            connection.request("GET", parts._replace(scheme="", netloc="", fragment="").geturl() or "/")
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise DataError(f"The image {url[:200]!r} of a prompt: the server answers {answer.status}.")
            data = bytearray()
            while chunk := answer.read1(1 << 16):
                data += chunk
                if len(data) > MAX_IMAGE_BYTES or time.monotonic() > deadline_s:
                    raise DataError(
                        f"The image {url[:200]!r} of a prompt: {len(data)} bytes so far; {MAX_IMAGE_BYTES} in "
                        f"{IMAGE_TIMEOUT_S:.0f} s are allowed."
                    )
            return bytes(data)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"The image {url[:200]!r} of a prompt cannot be fetched: {error!r}.") from error


def _public_connection(address: tuple[str, int], *others: Any) -> socket.socket:
    """Connect like ``socket.create_connection``, but only to public addresses."""
    host, port = address
    found = [entry[4] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for place in found:
        if not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_global:
            raise DataError(
                f"The image URL of a prompt leads to {place[0]} ({host}), which is not a public address. Give images "
                "of this network as files or bytes."
            )
    return socket.create_connection((str(found[0][0]), port), timeout=IMAGE_TIMEOUT_S)


def encode_image_for_rollout_engine(image: Any) -> str:
    """Encode a PIL image as the ``data:image/png;base64,...`` URL that engines take in ``image_data``."""
    buffer = io.BytesIO()
    as_rgb(image).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
