"""The vision towers that the trainer can have, by model type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.backends.megatron_utils.models import IS_PARTIAL
from slime.train_data.model_dims import TowerDims

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """What config.json does not say of a tower, and the positions that its images have in the language model."""

    parameters: Callable[[Config], int]
    """``vision_config`` of config.json -> parameters."""
    ffn_key: str = "intermediate_size"
    """Key of ``vision_config`` for the width of the MLPs in the blocks."""
    import_path: str = ""
    """Of transformers' class, where its ``AutoModel`` knows none for ``vision_config``."""
    spec: str = ""
    """Module of ``--spec`` that asks for the tower, as the flags about images do; without one, every model has it."""
    rotary_section: tuple[int, int, int] = (24, 20, 20)
    """Frequencies that turn by time, height and width, where config.json does not say (``mrope_section``)."""
    has_interleaved_axes: bool = True
    """The three axes take turns among the frequencies; otherwise each has a run of them, time the lowest."""

    def dims(self, vision: Config, *, is_trained: bool) -> TowerDims:
        """Return the sizes from ``vision_config`` of config.json."""
        return TowerDims(
            parameters=self.parameters(vision),
            depth=vision["depth"],
            hidden_size=vision["hidden_size"],
            ffn_hidden_size=vision[self.ffn_key],
            num_heads=vision["num_heads"],
            patch_side=vision["patch_size"],
            patch_size=vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2,
            merge=vision["spatial_merge_size"],
            out_size=vision["out_hidden_size"],
            num_mergers=1 + len(vision.get("deepstack_visual_indexes") or ()),
            is_gated=vision.get("hidden_act") == "silu",
            is_trained=is_trained,
        )


def qwen2_5_parameters(vision: Config) -> int:
    """Count patches, blocks, and what merges and projects patches."""
    hidden, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    patch = vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    block = 4 * hidden * hidden + 3 * hidden * inner + 7 * hidden + 2 * inner
    merger = merged * merged + merged + (merged + 1) * out
    return int(vision["depth"] * block + hidden * (patch + 1) + merger)


def qwen3_parameters(vision: Config) -> int:
    """Count patches, positions, blocks, and the mergers after some of them."""
    hidden, inner, merged = (
        vision["hidden_size"],
        vision["intermediate_size"],
        vision["hidden_size"] * vision["spatial_merge_size"] ** 2,
    )
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    block = 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner
    merger = merged * merged + merged + (merged + 1) * vision["out_hidden_size"]
    deep = len(vision.get("deepstack_visual_indexes") or ())
    ends = hidden * (patch + 1) + vision["num_position_embeddings"] * hidden + 2 * hidden + 2 * merged * deep
    return int(vision["depth"] * block + merger * (1 + deep) + ends)


def glm4_parameters(vision: Config) -> int:
    """Count patches, positions, blocks, and what merges and projects patches."""
    hidden, out = vision["hidden_size"], vision["out_hidden_size"]
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    block = 4 * hidden * hidden + 3 * hidden * out + 2 * hidden + 3 * hidden * bool(vision.get("attention_bias"))
    positions = (vision["image_size"] // vision["patch_size"]) ** 2
    merger = out * out + 2 * out + 3 * out * vision["intermediate_size"]
    downsample = out * (hidden * vision["spatial_merge_size"] ** 2 + 1)
    return int(vision["depth"] * block + hidden * (patch + positions + 3) + downsample + merger)


_QWEN3_VL = Tower(parameters=qwen3_parameters)
_QWEN3_5 = Tower(parameters=qwen3_parameters, spec="slime_plugins.models.qwen3_5_vl", rotary_section=(11, 11, 10))
_GLM4V = Tower(
    parameters=glm4_parameters, ffn_key="out_hidden_size", rotary_section=(8, 12, 12), has_interleaved_axes=False
)
TOWERS: Mapping[str, Tower] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _QWEN3_VL),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN3_5),
    **dict.fromkeys(("glm4v", "glm4v_moe"), _GLM4V),
    "qwen2_5_vl": Tower(
        parameters=qwen2_5_parameters,
        import_path="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
        rotary_section=(16, 24, 24),
        has_interleaved_axes=False,
    ),
}


def tower_of(config: Config, spec: Sequence[str] | None, *, is_asked: bool) -> Tower | None:
    """Return the tower of a checkpoint that the trainer's model has; None where it has none.

    Args:
        config: config.json; one that is known in part may have the tower.
        spec: ``--spec``, whose module may ask for the tower.
        is_asked: another flag does.
    """
    tower = TOWERS.get(str(config.get("model_type")))
    if tower is None or not (config.get("vision_config") or config.get(IS_PARTIAL)):
        return None
    return tower if is_asked or tower.spec in ("", (spec or ("",))[0]) else None
