"""A language model with a vision tower in front of it: transformers' own tower, whose output replaces the embeddings
of the image tokens of packed sequences.

The tower is on the first pipeline stage, whole on every rank.  A rank computes the images of which it has tokens:
under context parallelism those of its slices, under sequence parallelism those of its rows; both sides of a cut
compute the image that is cut.  Gradients are sums over these ranks, as those of norms are.

Everything that follows from token ids and image sizes is computed on the host, where both are: the device is never
waited for.

Shapes: L = tokens of a sequence; T = tokens of the micro-batch on this rank; I = images of a sequence or of the
micro-batch; n = rows of the tower's output; h = hidden size; r = rotated dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import cp_rank
from slime.backends.megatron_utils.layers.mtp import GPTModelWithMtp
from slime.backends.megatron_utils.layers.rotary import RotaryTables
from slime.backends.megatron_utils.models import family_of
from slime.backends.megatron_utils.models.flag_rules import hf_rope_settings, too_short_a_stage
from slime.train_data.microbatch import PackingConfig, pack_thd
from slime.utils.errors import ConfigError, DataError
from slime.utils.misc import load_function
from slime.utils.processing_utils import full_pixels, import_torchvision


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """The images of a micro-batch, on the host."""

    sequences: Sequence[Tensor]
    """[L] token ids of each sample, whole."""
    inputs: Sequence[Mapping[str, Any] | None]
    """Of each sample: ``pixel_values`` [patches, values], floats or bytes (``compact_pixels``), and
    ``image_grid_thw`` [I, 3], the patches of each image in time, height and width; None for one without images."""

    def grids(self) -> list[Tensor]:
        """Return ``image_grid_thw`` of each sample, [0, 3] for none.

        Raises:
            DataError: a sample has videos or sound.
        """
        none = torch.empty(0, 3, dtype=torch.long)
        for images in self.inputs:
            if images and ("image_grid_thw" not in images or any("video" in name for name in images)):
                raise DataError(f"a sample has {', '.join(images)}; the vision towers here take images alone")
        return [none if not images else images["image_grid_thw"].long().cpu() for images in self.inputs]


def place_images(tokens: Tensor, grids: Tensor, *, image_token: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return the rows of the tower's output that a sequence takes, and its positions.

    Text advances all axes by one a token.  An image has the axes of its own tokens, from where it begins, and what
    follows begins after its longer side.

    Args:
        tokens: [L] ids.
        grids: [I, 3] patches of its images in time, height and width.
        image_token: id in the place of each of an image's tokens.  After the last image it is an ordinary token: a
            policy may sample it.
        merge: patches along a side of what becomes one token.

    Returns:
        int64 [L], the row among those of this sequence, -1 for text; and [3, L].

    Raises:
        DataError: there are fewer image tokens than the images have.
    """
    times, heights, widths = grids[:, 0], grids[:, 1] // merge, grids[:, 2] // merge
    sizes = times * heights * widths
    ends = sizes.cumsum(0)
    total = int(sizes.sum())
    is_image = tokens == image_token
    count = is_image.cumsum(0)
    is_image &= count <= total
    if int(is_image.sum()) != total:
        raise DataError(
            f"a sample has {int(is_image.sum())} image tokens ({image_token}) and images of {total}: "
            f"image_grid_thw is {grids.tolist()}. Tokens and images must come from the processor of --hf-checkpoint, "
            "and a prompt must not be cut after it."
        )
    row = count.clamp(max=total) - is_image.long()  # for text the first row that comes after it
    image = torch.searchsorted(ends, row, right=True)
    saved = F.pad((sizes - torch.maximum(heights, widths)).cumsum(0), (1, 0))
    positions = (torch.arange(len(tokens)) - saved[image]).expand(3, -1).clone()
    image, row = image[is_image], row[is_image]
    within = row - (ends - sizes)[image]
    start = positions[0, is_image] - within
    height, width = heights[image], widths[image]
    axes = (within // (height * width), within // width % height, within % width)
    positions[:, is_image] = start + torch.stack(axes)
    rows = torch.full_like(tokens, -1)
    rows[is_image] = row
    return rows, positions


@dataclass(frozen=True, slots=True)
class PlacedImages:
    """Sources of the embeddings and positions of this rank's tokens."""

    rows_T: Tensor
    """Row of the tower's output over the images of the whole micro-batch; -1 for text."""
    positions_3T: Tensor
    grids: Tensor
    """[I, 3] of all images."""
    pixels: Sequence[Mapping[str, Any]]
    """``pixel_values`` [patches, values] of each image, and ``pixel_range`` where they are bytes."""

    @classmethod
    def of(cls, images: ImageBatch, num_tokens: int, *, image_token: int, merge: int) -> PlacedImages | None:
        """Place the images of a micro-batch on this context-parallel rank; None where it has no images."""
        grids = images.grids()
        if not any(map(len, grids)):
            return None
        rows: list[Tensor] = []
        positions: list[Tensor] = []
        num_rows = 0
        for tokens, grid in zip(images.sequences, grids, strict=True):
            row, position = place_images(tokens, grid, image_token=image_token, merge=merge)
            rows.append(torch.where(row < 0, row, row + num_rows))
            positions.append(position)
            num_rows += int(grid.prod(1).sum()) // merge**2
        pixels = [
            {**inputs, "pixel_values": part}
            for grid, inputs in zip(grids, images.inputs, strict=True)
            if inputs
            for part in inputs["pixel_values"].split(grid.prod(1).tolist())
        ]
        packing = PackingConfig(cp_rank(), pad_multiple=num_tokens)
        axes = [pack_thd([position[axis] for position in positions], packing).tokens[0] for axis in range(3)]
        rows_T = pack_thd(rows, packing, pad_id=-1).tokens[0]
        return cls(rows_T, torch.stack(axes), torch.cat(grids), pixels)

    def of_rows(self, start: int, stop: int, merge: int) -> tuple[Tensor, Tensor, list[int]]:
        """Return what the tokens from ``start`` to ``stop`` need: their places, counted from ``start``, the rows that
        they take of the output for the images they need, and these images.
        """
        rows = self.rows_T[start:stop]
        places = (rows >= 0).nonzero()[:, 0]
        sizes = self.grids.prod(1) // merge**2
        ends = sizes.cumsum(0)
        image = torch.searchsorted(ends, rows[places], right=True)
        needed = image.unique()
        before = torch.zeros_like(sizes)
        before[needed] = F.pad(sizes[needed].cumsum(0), (1, 0))[:-1]
        return places, rows[places] - (ends - sizes)[image] + before[image], needed.tolist()


def rotary_axes(section: Sequence[int], *, interleaved: bool) -> Tensor:
    """Return int64 [r / 2]: 0, 1 or 2 where a frequency turns by time, height or width.

    Args:
        interleaved: frequencies 1, 4, ... turn by height, 2, 5, ... by width, as far as their sections go; else the
            axes have runs of them, one behind the other.
    """
    if not interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(section))
    axes = torch.zeros(sum(section), dtype=torch.long)
    for offset in (1, 2):
        axes[offset : 3 * section[offset] : 3] = offset
    return axes


class _ReturnGradients(torch.autograd.Function):
    """Identity on the embeddings, through which the features that layers add get their gradients back.

    Layers read detached leaves, so that a recomputed layer, which has a separate backward pass, can do so too.  The
    gradient of the embeddings comes after those of all layers.
    """

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, leaves: Sequence[Tensor], *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaves: Sequence[Tensor] = ctx.leaves
        return grads[0], None, *(leaf.grad for leaf in leaves)


@dataclass(frozen=True, slots=True)
class LayerFeatures:
    """Features that the first layers add to the hidden states of image tokens (DeepStack, arXiv:2406.04334)."""

    places: Tensor
    features: Sequence[Tensor]
    """[places, h] for each of these layers."""


class VisionModel(GPTModel):
    """GPTModel whose first stage has a vision tower, ``vision_model``, and whose positions have three axes."""

    def __init__(
        self, config: TransformerConfig, *args: Any, folder: str, hf_config: Mapping[str, Any], trains_tower: bool,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Take the arguments of GPTModel.

        Args:
            folder: with the config.json that transformers builds the tower from; its weights are not read.
            hf_config: that config.json, as ``read_hf_config`` gives it.

        Raises:
            ConfigError: layers that take features of the tower are not on the first stage.
        """
        super().__init__(config, *args, **kwargs)
        vision = hf_config["vision_config"]
        self.image_token = int(hf_config["image_token_id"])
        self.merge = int(vision["spatial_merge_size"])
        family = family_of(hf_config)
        assert family is not None, "only families have towers"
        section = hf_rope_settings(hf_config).get("mrope_section") or family.rotary_section
        self.axes = rotary_axes(section, interleaved=family.has_interleaved_axes)
        if not self.pre_process:
            return
        self.vision_model = _build_tower(folder, family.tower_class).requires_grad_(trains_tower)
        depth = len(vision.get("deepstack_visual_indexes") or ())
        if (layers := len(self.decoder.layers)) < depth:
            raise ConfigError(too_short_a_stage(layers, depth))
        for layer in self.decoder.layers[:depth]:
            layer.register_forward_hook(_add_features, with_kwargs=True)
        if config.sequence_parallel:
            for parameter in self.vision_model.parameters():
                # megatron-core then adds up the ranks' gradients, each of its own images.
                vars(parameter)["sequence_parallel"] = True

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep the tower's frequencies in fp32 when the model becomes bf16: they are computed, not loaded."""
        kept = {name: buffer for name, buffer in self.named_buffers() if name.endswith("inv_freq")}
        result = super()._apply(fn, recurse)
        for name, buffer in kept.items():
            owner, _, last = name.rpartition(".")
            module = self.get_submodule(owner)
            setattr(module, last, buffer.to(getattr(module, last).device))
        return result

    def forward(
        self,
        input_ids: Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        images: ImageBatch | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run as GPTModel does, with ``images`` in the places of their tokens."""
        placed = None
        if images is not None:
            placed = PlacedImages.of(images, input_ids.size(1), image_token=self.image_token, merge=self.merge)
        params: Any = packed_seq_params
        if placed is not None:
            params.rotary_tables = self._rotary_tables(_sent(placed.positions_3T, input_ids.device))
        if self.pre_process:
            kwargs["decoder_input"] = self._embed_images(input_ids, placed, params)
        return super().forward(input_ids, *args, packed_seq_params=packed_seq_params, **kwargs)

    def _rotary_tables(self, positions_3T: Tensor) -> RotaryTables:
        """Return the tables of positions with three axes, [T, r / 2]."""
        frequencies = self.rotary_pos_emb.inv_freq.float().to(positions_3T.device)
        turning = positions_3T[_sent(self.axes, positions_3T.device)].T.contiguous()  # a GPU's kernel reads row by row
        angles = turning.float() * frequencies
        return RotaryTables(angles.cos(), angles.sin())

    def _embed_images(self, input_ids: Tensor, placed: PlacedImages | None, params: Any) -> Tensor:
        """Return the embeddings [T, 1, h] (of this rank's rows under sequence parallelism), images in their places."""
        embeddings = self.embedding(input_ids=input_ids, position_ids=None)
        is_trained = self.training and any(x.requires_grad for x in self.vision_model.parameters())
        start = mpu.get_tensor_model_parallel_rank() * len(embeddings) if self.config.sequence_parallel else 0
        places, rows, needed = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long), list[int]()
        if placed is not None:
            places, rows, needed = placed.of_rows(start, start + len(embeddings), self.merge)
        if placed is None or not needed:
            # Ranks reduce gradients together: a trained tower has some in every pass, though they be zero.
            return embeddings + self._no_images(embeddings) if is_trained else embeddings
        device = embeddings.device
        with nullcontext() if is_trained else torch.no_grad():
            output = self._run_tower(placed.grids[needed], [placed.pixels[image] for image in needed])
        places, rows = _sent(places, device), _sent(rows, device)
        output = [features.to(embeddings.dtype).index_select(0, rows) for features in output]
        embeddings = embeddings.index_copy(0, places, output[0][:, None])
        features = output[1:]
        if is_trained and features:
            leaves = [feature.detach().requires_grad_() for feature in features]
            embeddings = _ReturnGradients.apply(embeddings, leaves, *features)
            features = leaves
        params.layer_features = LayerFeatures(places, features)
        return embeddings

    def _no_images(self, embeddings: Tensor) -> Tensor:
        """Return zero, to which every parameter of the tower contributes."""
        grid = torch.tensor([[1, self.merge, self.merge]])
        config: Any = self.vision_model.config
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        output = self._run_tower(grid, [{"pixel_values": torch.zeros(self.merge**2, width)}])
        return 0.0 * torch.stack([features.sum() for features in output]).sum().to(embeddings.dtype)

    def _run_tower(self, grids: Tensor, pixels: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Return [n, h] of these images: the rows of the embeddings, then those of each layer that takes some."""
        from transformers import vision_utils

        tower = self.vision_model
        device = next(tower.parameters()).device
        positions: dict[str, Tensor] = {}
        if hasattr(tower, "pos_embed"):  # others look into their table themselves
            indices, weights = vision_utils.get_vision_bilinear_indices_and_weights(
                grids, num_grid_per_side=tower.num_grid_per_side, spatial_merge_size=self.merge
            )
            positions = {"bilinear_indices": _sent(indices, device), "bilinear_weights": _sent(weights, device)}
        output = tower(
            torch.cat([full_pixels({**part, "pixel_values": _sent(part["pixel_values"], device)}) for part in pixels]),
            grid_thw=grids,
            position_ids=_sent(vision_utils.get_vision_position_ids(grids, self.merge), device),
            cu_seqlens=vision_utils.get_vision_cu_seqlens(grids),  # read by the host, layer by layer
            return_dict=True,
            **positions,
        )
        return [output.pooler_output, *(output.get("deepstack_features") or ())]


class VisionModelWithMtp(VisionModel, GPTModelWithMtp):  # type: ignore[misc]  # one names the first argument
    """Both; its MTP layers are not trained, since the last stage does not have the images."""


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the host's ``tensor`` on ``device``; a copy from memory that is not pinned would wait for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _build_tower(folder: str, tower_class: str) -> Any:
    """Return transformers' tower for the config.json in ``folder``, in fp32, with random weights."""
    import_torchvision()  # transformers looks for it
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder).vision_config
    build = load_function(tower_class)._from_config if tower_class else AutoModel.from_config
    tower: Any = build(config, dtype=torch.float32, attn_implementation="sdpa")
    if hasattr(tower, "embeddings"):  # it takes lengths and sizes of the images, which are on the host
        tower.embeddings.register_forward_pre_hook(lambda module, args: tuple(x.to(args[0].device) for x in args))
    return tower


def _add_features(layer: Any, inputs: Any, kwargs: Mapping[str, Any], output: tuple[Tensor, Any]) -> Any:
    """Add the features of the tower to what a layer returns; a forward hook."""
    own: LayerFeatures | None = getattr(kwargs.get("packed_seq_params"), "layer_features", None)
    if own is None:
        return output
    hidden, context = output
    return hidden.index_add(0, own.places, own.features[layer.layer_number - 1][:, None]), context
