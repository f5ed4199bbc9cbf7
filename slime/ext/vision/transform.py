"""A vision tower in front of a language model: transformers' own, whose output replaces the embeddings of the image
tokens of packed sequences.

The tower is on the first pipeline stage, whole on every rank.  A rank computes the images of which it has tokens:
under context parallelism those of its slices, under sequence parallelism those of its rows; both sides of a cut
compute the image that is cut.  Gradients are sums over these ranks, as those of norms are.

The device is never waited for: what follows from token ids and image sizes is computed on the host (:mod:`.images`).

Shapes: T = tokens of the micro-batch on this rank; n = rows of the tower's output; h = hidden size; r = rotated
dimensions of a head.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model

from slime.backends.megatron_utils.flags.hf_config_check import read_hf_config
from slime.backends.megatron_utils.layers.mtp import GPTModelWithMtp
from slime.backends.megatron_utils.layers.rotary import RotaryTables
from slime.backends.megatron_utils.model_provider import freeze_parameters
from slime.backends.megatron_utils.model_transform import ModelTransform
from slime.backends.megatron_utils.models.flag_rules import hf_rope_settings
from slime.ext.vision.checks import too_short_a_stage
from slime.ext.vision.images import ImageBatch, PlacedImages
from slime.ext.vision.towers import TOWERS
from slime.utils.errors import ConfigError
from slime.utils.misc import load_function
from slime.utils.processing_utils import full_pixels
from slime.utils.torchvision_package import import_torchvision


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


class JoinedInputs(ModelTransform):
    """Gives a user's model the processor's outputs for all samples, joined, on the device."""

    _is_for_text = False

    def after_build(self, chunk: torch.nn.Module) -> None:
        """Leave the model as it is."""
        self._is_for_text = type(unwrap_model(chunk)) in (GPTModel, GPTModelWithMtp)

    def arguments(self, batch: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the outputs by their names, pixels as floats; None for a model of text alone."""
        if self._is_for_text:
            return None
        inputs = batch.get("multimodal_train_inputs") or ()
        joined = {}
        for name in dict.fromkeys(name for sample in inputs for name in sample or () if name != "pixel_range"):
            read = full_pixels if name == "pixel_values" else itemgetter(name)
            parts = [read(sample) for sample in inputs if sample and name in sample]
            joined[name] = torch.cat(parts).to(batch["tokens"].device)
        return joined


class VisionTower(ModelTransform):
    """Puts a tower, ``vision_model``, on the first stage, and gives positions three axes on every stage."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        config = read_hf_config(args.hf_checkpoint)
        tower, vision = TOWERS[config["model_type"]], config["vision_config"]
        self._import_path = tower.import_path
        self._image_token = int(config["image_token_id"])
        self._merge = int(vision["spatial_merge_size"])
        self._depth = len(vision.get("deepstack_visual_indexes") or ())
        section = hf_rope_settings(config).get("mrope_section") or tower.rotary_section
        self._axes = rotary_axes(section, interleaved=tower.has_interleaved_axes)

    def after_build(self, chunk: Any) -> None:
        """Add the tower to a chunk that embeds tokens.

        Raises:
            ConfigError: layers that take features of the tower are not on the first stage.
        """
        chunk.register_forward_pre_hook(self._take_images, with_kwargs=True)
        if not chunk.pre_process:
            return
        chunk.vision_model = _build_tower(self.args.hf_checkpoint, self._import_path)
        chunk.vision_model.requires_grad_(self.args.train_vision_tower)
        only_train, freeze = self.args.only_train_params_name_list, self.args.freeze_params_name_list
        freeze_parameters(chunk, only_train=only_train, freeze=freeze)
        if (layers := len(chunk.decoder.layers)) < self._depth:
            raise ConfigError(too_short_a_stage(layers, self._depth))
        for layer in chunk.decoder.layers[: self._depth]:
            layer.register_forward_hook(_add_features, with_kwargs=True)
        for parameter in chunk.vision_model.parameters():
            marks = vars(parameter)
            marks["is_constant_when_frozen"] = True
            if chunk.config.sequence_parallel:
                marks["sequence_parallel"] = True  # megatron-core sums the gradients of ranks' images

    def arguments(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the images of a micro-batch."""
        inputs = batch.get("multimodal_train_inputs")
        return {"images": ImageBatch(batch["host_tokens"], inputs)} if inputs else {}

    def _take_images(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace ``images`` by embeddings in the places of their tokens, and by positions; a forward pre-hook."""
        input_ids = args[0] if args else kwargs["input_ids"]
        params: Any = kwargs.get("packed_seq_params")
        placed = None
        if (images := kwargs.pop("images", None)) is not None:
            placed = PlacedImages.of(images, input_ids.size(1), image_token=self._image_token, merge=self._merge)
        if placed is not None:
            params.rotary_tables = self._rotary_tables(model, _sent(placed.positions_3T, input_ids.device))
        if model.pre_process:
            kwargs["decoder_input"] = self._embed_images(model, input_ids, placed, params)
        return args, kwargs

    def _rotary_tables(self, model: Any, positions_3T: Tensor) -> RotaryTables:
        """Return the tables of positions with three axes, [T, r / 2]."""
        frequencies = model.rotary_pos_emb.inv_freq.float().to(positions_3T.device)
        # Contiguous: a GPU's kernel reads row by row.
        turning = positions_3T[_sent(self._axes, positions_3T.device)].T.contiguous()
        angles = turning.float() * frequencies
        return RotaryTables(angles.cos(), angles.sin())

    def _embed_images(self, model: Any, input_ids: Tensor, placed: PlacedImages | None, params: Any) -> Tensor:
        """Return the embeddings [T, 1, h] (of this rank's rows under sequence parallelism), images in their places."""
        embeddings = model.embedding(input_ids=input_ids, position_ids=None)
        is_trained = model.training and any(x.requires_grad for x in model.vision_model.parameters())
        start = mpu.get_tensor_model_parallel_rank() * len(embeddings) if model.config.sequence_parallel else 0
        places, rows, needed = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long), list[int]()
        if placed is not None:
            places, rows, needed = placed.of_rows(start, start + len(embeddings), self._merge)
        if placed is None or not needed:
            # Ranks reduce gradients together: a trained tower has some in every pass, though they be zero.
            return embeddings + self._no_images(model.vision_model, embeddings) if is_trained else embeddings
        device = embeddings.device
        pixels = [placed.pixels[image] for image in needed]
        with nullcontext() if is_trained else torch.no_grad():
            output = self._run_tower(model.vision_model, placed.grids[needed], pixels)
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

    def _no_images(self, tower: Any, embeddings: Tensor) -> Tensor:
        """Return zero, to which every parameter of the tower contributes."""
        grid = torch.tensor([[1, self._merge, self._merge]])
        config = tower.config
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        output = self._run_tower(tower, grid, [{"pixel_values": torch.zeros(self._merge**2, width)}])
        return 0.0 * torch.stack([features.sum() for features in output]).sum().to(embeddings.dtype)

    def _run_tower(self, tower: Any, grids: Tensor, pixels: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Return [n, h] of these images: the rows of the embeddings, then those of each layer that takes some."""
        from transformers import vision_utils

        device = next(tower.parameters()).device
        positions: dict[str, Tensor] = {}
        if hasattr(tower, "pos_embed"):  # others look into their table themselves
            indices, weights = vision_utils.get_vision_bilinear_indices_and_weights(
                grids, num_grid_per_side=tower.num_grid_per_side, spatial_merge_size=self._merge
            )
            positions = {"bilinear_indices": _sent(indices, device), "bilinear_weights": _sent(weights, device)}
        output = tower(
            torch.cat([full_pixels({**part, "pixel_values": _sent(part["pixel_values"], device)}) for part in pixels]),
            grid_thw=grids,
            position_ids=_sent(vision_utils.get_vision_position_ids(grids, self._merge), device),
            cu_seqlens=vision_utils.get_vision_cu_seqlens(grids),  # read by the host, layer by layer
            return_dict=True,
            **positions,
        )
        return [output.pooler_output, *(output.get("deepstack_features") or ())]


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the host's ``tensor`` on ``device``; a copy from memory that is not pinned would wait for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _build_tower(folder: str, import_path: str) -> Any:
    """Return transformers' tower for the config.json in ``folder``, in fp32, with random weights."""
    import_torchvision()  # transformers looks for it
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder).vision_config
    build = load_function(import_path)._from_config if import_path else AutoModel.from_config
    tower: Any = build(config, dtype=torch.float32, attn_implementation="sdpa")
    if hasattr(tower, "embeddings"):  # it takes lengths and sizes of the images, which are on the host
        tower.embeddings.register_forward_pre_hook(lambda module, args: tuple(x.to(args[0].device) for x in args))
    _keep_frequencies(tower)
    return tower


def _keep_frequencies(tower: Any) -> None:
    """Let a tower compute with fp32 frequencies in a model that becomes bf16: they are computed, not loaded.

    They are buffers no more: what casts a model, or keeps host copies of it, leaves them as they are.
    """
    for module in tower.modules():
        if "inv_freq" in module._buffers:
            frequencies = module.inv_freq
            del module.inv_freq
            module.inv_freq = frequencies
            tower.register_forward_pre_hook(partial(_bring_frequencies, module=module))


def _bring_frequencies(tower: Any, args: tuple[Any, ...], *, module: Any) -> None:
    module.inv_freq = module.inv_freq.to(next(tower.parameters()).device)


def _add_features(layer: Any, inputs: Any, kwargs: Mapping[str, Any], output: tuple[Tensor, Any]) -> Any:
    """Add the features of the tower to what a layer returns; a forward hook."""
    own: LayerFeatures | None = getattr(kwargs.get("packed_seq_params"), "layer_features", None)
    if own is None:
        return output
    hidden, context = output
    return hidden.index_add(0, own.places, own.features[layer.layer_number - 1][:, None]), context
