"""Qwen3.5 with its vision tower, dense and with experts: images in the prompts, and delta nets that read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.matrix.case import FamilyCase
from tests.matrix.families import qwen3_5
from tests.matrix.flags import model_flags
from tests.matrix.references.composite import VISION
from tests.matrix.references.vision import as_pushed, image_adder, reference

ASKED_FOR = ("--spec", "slime_plugins.models.qwen3_5_vl", "get_qwen3_5_vl_model_provider", "--train-vision-tower")


def _seeing(text: FamilyCase, **more: Any) -> FamilyCase:
    """The case of a text model with its tower, where each axis rotates some frequencies, and a frozen MTP layer."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return replace(
        text,
        name=text.name.replace("qwen3_5", "qwen3_5_vl"),
        config={**text.config, "rope_parameters": rope},
        reference=reference,
        pushed=as_pushed,
        extra_loss=None,
        add_images=image_adder(VISION),
        **more,
    )


CASES = (
    _seeing(
        qwen3_5.DENSE,
        flags=lambda folder: model_flags(folder, "--mtp-num-layers", "1", "--train-vision-tower"),
        about="Qwen3.5 with the tower, trained, and the images of Qwen3-VL; the MTP layer frozen",
    ),
    _seeing(
        qwen3_5.EXPERTS,
        flags=lambda folder: model_flags(folder, "--mtp-num-layers", "1", *ASKED_FOR),
        about="the same with experts, the tower asked for by its spec",
    ),
)
