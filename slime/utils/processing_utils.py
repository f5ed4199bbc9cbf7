"""Load a model's tokenizer and processor, and prepare images.

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
"""Others of PIL's run programs, or are rare and old."""
MAX_IMAGE_PIXELS = 1 << 26
MAX_IMAGE_BYTES = 1 << 26
IMAGE_TIMEOUT_S = 20.0
MAX_PATH = 4096
"""Characters of a path; a longer text is base64."""
IMAGE_NAMES = ("image", "image_url", "input_image")
"""Types of parts of messages that are images, and the keys of their sources."""
NOT_SEEN = ("video", "video_url", "input_video", "audio", "audio_url", "input_audio")
"""The same of parts that no model here takes."""
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""What a part may say of the size of its image."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def load_tokenizer(path: str, **kwargs: Any) -> Any:
    """Return the tokenizer of a Hugging Face folder or hub name; ``kwargs`` go to ``AutoTokenizer.from_pretrained``.

    Raises:
        ConfigError: there is none, or it cannot be read.
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
    """Raise ConfigError when transformers failed because the folder's own code would have to run."""
    config = Path(path) / "tokenizer_config.json"  # where a class of transformers has the model's name, it is tried
    brings_code = config.is_file() and "auto_map" in config.read_text(encoding="utf-8", errors="replace")
    if "trust_remote_code" in str(error) or (brings_code and not trusted):
        raise ConfigError(
            f"{path} brings Python code of its own, which this job would have to run. Read it, and add "
            "--trust-remote-code if you trust it; or use a folder whose files transformers reads by itself."
        ) from error


def _has_processor(path: str) -> bool:
    """Return False for a folder without a processor; for others, transformers finds torchvision from the start.

    It looks when its tokenizers are imported, too, and remembers.
    """
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in PROCESSOR_FILES):
        return False
    import_torchvision()
    return True


def load_processor(path: str, **kwargs: Any) -> Any | None:
    """Return the processor of a multimodal model; None when the model has none.

    A processor whose own dependencies are missing counts as none, with a warning: text-only training goes on without.
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
        logger.warning("The processor of %s is not used, because it needs what is not installed: %s", path, error)
        return None
    if not isinstance(processor, ProcessorMixin):
        return None
    return processor


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Return keyword arguments for ``processor(text=..., **kwargs)``: ids as lists, everything else as
    torch tensors, images in RGB.
    """
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
    """Return the ids of a text with images, and the processor's other outputs, which the trainer gets."""
    outputs = processor(text=text, **build_processor_kwargs(multimodal_inputs))
    ids = outputs["input_ids"].tolist() if hasattr(outputs["input_ids"], "tolist") else list(outputs["input_ids"])
    train_inputs = {k: v for k, v in outputs.items() if k not in ("input_ids", "attention_mask")}
    return list(ids[0]) if ids and isinstance(ids[0], list) else ids, compact_pixels(train_inputs, processor)


def one_id_an_image(input_ids: Sequence[int], image_token: int) -> list[int]:
    """Return the ids as an engine takes them: one represents each image, which its processor puts in its place."""
    before = [None, *input_ids[:-1]]
    return [token for token, last in zip(input_ids, before, strict=True) if not token == last == image_token]


def check_image_tokens(name: str, payload: Mapping[str, Any], meta_info: Mapping[str, Any], num_tokens: int) -> None:
    """Check that the engine made as many tokens of the images of ``payload`` as the trainer will read.

    Raises:
        DataError: it made another number.
    """
    counted, was_aborted = meta_info.get("prompt_tokens"), meta_info["finish_reason"].get("type") == "abort"
    if payload.get("image_data") and counted and counted != num_tokens and not was_aborted:
        raise DataError(
            f"{name} with {len(payload['image_data'])} images has {num_tokens} tokens, and {counted} in the engine: "
            "its processor makes images of another size. Both read the processor's files in --hf-checkpoint; look at "
            "SGLANG_IMAGE_MAX_PIXELS, and at the size of the images."
        )


def compact_pixels(inputs: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Return a processor's outputs with ``pixel_values`` as bytes, a quarter of the memory, where that loses nothing.

    Beside them is ``pixel_range``, what :func:`full_pixels` needs.  Pixels that are no bytes shifted and scaled, all
    channels alike, stay as they are.
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
    """Return ``pixel_values`` as the processor gave them, on the device where they are."""
    pixels = inputs["pixel_values"]
    if "pixel_range" not in inputs:
        return pixels
    shift, scale = inputs["pixel_range"].tolist()
    return pixels.float().sub_(shift).div_(scale)


def join_images(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the processor's outputs for images that were processed apart, one after the other."""
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
    """Return ``{"images": [...] | None, "videos": None}`` found in chat messages, in order.

    qwen_vl_utils, where it is installed, resizes images to multiples of the patch size.  It would open paths and fetch
    URLs by itself, so it gets opened images alone.

    Raises:
        DataError: an image cannot be used, see :func:`open_image`; or there is a video or sound.
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
    """Return the pictures and videos of a sample, in order."""
    lists = (sample.multimodal_inputs or {}).values()
    return [item for items in lists if isinstance(items, (list, tuple)) for item in items]


def image_sources(prompt: Sequence[dict[str, Any]]) -> list[Any]:
    """Return what chat messages name as images, in order: paths, URLs, bytes.

    Raises:
        DataError: there is a video or sound.
    """
    return [_source(part) for part in _image_parts(prompt)]


def _image_parts(prompt: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for holder in prompt:
        content = holder.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping):
                continue
            if unseen := _first_name(part, NOT_SEEN):
                raise DataError(f"A message has a part of type {unseen}; models see images alone. Leave it out.")
            if _first_name(part, IMAGE_NAMES):
                yield part
            else:
                yield from _image_parts([part])


def _first_name(part: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of ``names`` that is the type of a part, or a key with a value."""
    return next((name for name in names if part.get("type") == name or part.get(name) is not None), None)


def _source(part: Mapping[str, Any]) -> Any:
    return _unwrapped(next((part[name] for name in IMAGE_NAMES if part.get(name) is not None), part))


def _unwrapped(source: Any) -> Any:
    if not isinstance(source, Mapping):
        return source
    return next((source[key] for key in ("bytes", "path", "url", "base64") if source.get(key)), source)


def as_rgb(image: Any) -> Any:
    """Return a PIL image in RGB, upright as its EXIF data says, on white where it is transparent, and with 16 bits a
    channel scaled to 8; what is so already, or no PIL image, is returned itself.
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
    """Return a PIL image in RGB, decoded; see :func:`as_rgb`.

    Args:
        source: a path, a ``file:``, ``data:``, ``http:`` or ``https:`` URL, bytes, base64, an image, or a map with
            one of these under ``bytes``, ``path``, ``url`` or ``base64``.

    Raises:
        DataError: it cannot be read, is damaged or cut off, of an unknown format, animated, too large, or of a mode
            that has no plain picture: CMYK, 32 bits a pixel.
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
            return as_rgb(image).convert("RGB")  # a copy, without the file
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"The image {name} of a prompt cannot be decoded: {error}. Is it whole?") from error
    except Image.DecompressionBombError as error:
        raise DataError(f"The image {name} of a prompt is too large: {error}") from error


def _image_data(source: Any) -> tuple[str, bytes]:
    """Return a name for messages, and the bytes of the file."""
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
            raise DataError(f"The image {name} of a prompt is no base64: {error}.") from error
    path = Path(source.removeprefix("file://"))
    try:
        if not path.is_file():  # reading a device or a pipe may not end
            raise DataError(f"The image {name} of a prompt cannot be opened: there is no such file.")
        if (size := path.stat().st_size) > MAX_IMAGE_BYTES:
            raise DataError(f"The image {name} of a prompt has {size} bytes; {MAX_IMAGE_BYTES} are allowed.")
        return name, path.read_bytes()
    except OSError as error:
        raise DataError(f"The image {name} of a prompt cannot be opened: {error}.") from error


def _fetched(url: str) -> bytes:
    """Return what a web server sends for ``url``; redirections are not followed.

    Raises:
        DataError: the host is, or resolves to, an address that is not public; or it sends an error, too much, or
            nothing in time.
    """
    deadline_s = time.monotonic() + IMAGE_TIMEOUT_S
    try:
        parts = urllib.parse.urlsplit(url)
        connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = connection_class(parts.hostname or "", parts.port, timeout=IMAGE_TIMEOUT_S)
        # Connected to the address that was looked at: a second look-up may give another one.
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
    """Connect as ``socket.create_connection`` does, to public addresses alone."""
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
    """Return a PIL image as the ``data:image/png;base64,...`` URL that the engine takes in ``image_data``."""
    buffer = io.BytesIO()
    as_rgb(image).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
