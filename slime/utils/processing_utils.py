"""Load a model's tokenizer and processor, and prepare images.

transformers, PIL and qwen_vl_utils are imported by the functions that need them.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.utils.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

DEFAULT_PATCH_SIZE = 14
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def import_torchvision() -> bool:
    """Import torchvision, which image processors need; return False where it is not installed or does not work.

    A build for CUDA beside a torch without it lacks its operators.  They are then declared, without kernels: preparing
    images needs none, but transformers imports no processor, and few models, beside a torchvision that fails.
    """
    if importlib.util.find_spec("torchvision") is None:
        return False
    for declares in (False, True):
        if declares:
            _declare_operators()
        try:
            import torchvision  # noqa: F401
        except (ImportError, RuntimeError, OSError):
            for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
        else:
            return True
    return False


@functools.cache
def _declare_operators() -> Any:
    """Declare what torchvision looks up while it is imported; the library lives as long as the process."""
    import torch

    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def load_tokenizer(path: str, **kwargs: Any) -> Any:
    """Return the tokenizer of a Hugging Face folder or hub name; ``kwargs`` go to ``AutoTokenizer.from_pretrained``.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
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


def load_processor(path: str, **kwargs: Any) -> Any | None:
    """Return the processor of a multimodal model; None when the model has none.

    A processor whose own dependencies are missing counts as none, with a warning: text-only training goes on without.
    """
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in PROCESSOR_FILES):
        return None
    import_torchvision()
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
    return processor if isinstance(processor, ProcessorMixin) else None


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Return keyword arguments for ``processor(text=..., **kwargs)``: ids as lists, everything else as
    torch tensors.
    """
    kwargs = dict(multimodal_inputs or {})
    forced: dict[str, dict[str, Any]] = {
        "text_kwargs": {"return_tensors": None, "return_mm_token_type_ids": False},
        "audio_kwargs": {"return_tensors": "pt"},
        "images_kwargs": {"return_tensors": "pt"},
        "videos_kwargs": {"return_tensors": "pt"},
    }
    for name, values in forced.items():
        kwargs[name] = {**(kwargs.get(name) or {}), **values}
    return kwargs


def process_vision_info(prompt: Sequence[dict[str, Any]], processor: Any) -> dict[str, Any]:
    """Return ``{"images": [...] | None, "videos": [...] | None}`` found in chat messages, in order.

    Uses qwen_vl_utils where it is installed (it also resizes images to multiples of the patch size); without it
    images are opened as they are and videos are refused.
    """
    try:
        from qwen_vl_utils import process_vision_info as qwen_process_vision_info
    except ImportError:
        return _open_images(prompt)
    image_processor = getattr(processor, "image_processor", None)
    patch_size = getattr(image_processor, "patch_size", None) or DEFAULT_PATCH_SIZE
    images, videos = qwen_process_vision_info(prompt, image_patch_size=patch_size)
    return {"images": images, "videos": videos}


def _open_images(prompt: Sequence[dict[str, Any]]) -> dict[str, Any]:
    images = []
    for message in prompt:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if part.get("type") == "video":
                raise DataError("A prompt holds a video; reading videos needs the package qwen_vl_utils.")
            if part.get("type") in ("image", "image_url"):
                images.append(_open_image(part.get("image", part.get("image_url"))))
    return {"images": images or None, "videos": None}


def _open_image(source: Any) -> Any:
    """Return a PIL image in RGB from a path, a ``data:`` or ``file:`` URL, bytes, ``{"bytes": ...}`` or an image."""
    from PIL import Image

    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path") or source.get("url")
    if isinstance(source, Image.Image):
        return source.convert("RGB")
    if isinstance(source, str) and source.startswith("data:"):
        source = base64.b64decode(source.partition(",")[2])
    if isinstance(source, (bytes, bytearray)):
        return Image.open(io.BytesIO(source)).convert("RGB")
    if isinstance(source, str) and not source.startswith(("http://", "https://")):
        try:
            return Image.open(source.removeprefix("file://")).convert("RGB")
        except OSError as error:
            raise DataError(f"The image {source!r} of a prompt cannot be opened: {error}.") from error
    raise DataError(f"An image of a prompt is {str(source)[:80]!r}; it must be a local path, bytes or a data: URL.")


def encode_image_for_rollout_engine(image: Any) -> str:
    """Return a PIL image as the ``data:image/png;base64,...`` URL that the engine takes in ``image_data``."""
    buffer = io.BytesIO()
    (image if image.mode in ("RGB", "RGBA", "L", "P") else image.convert("RGB")).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
