"""What does not go with a vision tower, or with a model that has none."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from slime.backends.megatron_utils.flags.parallel import PipelineSplit
from slime.backends.sglang_utils.sglang_config import load_sglang_config
from slime.ext.vision.towers import TOWERS, tower_of


def tower_problems(args: Namespace, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what asks for a vision tower that the trainer's model does not have."""
    if args.custom_model_provider_path:
        return
    is_asked = bool(args.train_vision_tower or args.multimodal_keys)
    if tower_of(config, args.spec, is_asked=is_asked) is not None:
        if others := set(args.multimodal_keys or ()) - {"image"}:
            yield (
                f"--multimodal-keys has {', '.join(sorted(others))}; the vision towers here, and the requests to "
                "engines, take images alone. Leave it out, or give --custom-model-provider-path and "
                "--custom-generate-function-path."
            )
        yield from _features_without_layers(PipelineSplit.from_args(args), config.get("vision_config") or {})
        if args.enable_mtp_training:
            yield (
                "--enable-mtp-training is given for a model with a vision tower; its MTP layers can be kept as they "
                "are (--mtp-num-layers alone). Drop the flag."
            )
        return
    kind = config.get("model_type")
    what = f"has no vision tower for a {kind}; it has those of {', '.join(sorted(TOWERS))}"
    if kind in TOWERS:
        what = f"builds the tower of a {kind} by vision_config of config.json, which is not there"
    for flag, value in (
        ("--train-vision-tower", args.train_vision_tower),
        ("--multimodal-keys", args.multimodal_keys),
    ):
        if value:
            yield f"{flag} is given, but the trainer {what}. Drop the flag, or give --custom-model-provider-path."


def _features_without_layers(split: PipelineSplit, vision: Mapping[str, Any]) -> Iterator[str]:
    """Yield that the first stage, which has the tower, lacks layers that take features of it.

    A custom pipeline layout is looked at when the model is built.
    """
    depth = len(vision.get("deepstack_visual_indexes") or ())
    layers, stages = split.num_layers + split.embedding_counts + split.loss_counts, split.stages
    if split.first is not None:
        layers, stages = split.first, 1
    elif split.last is not None and stages > 1:
        layers, stages = layers - split.last, stages - 1
    first = layers // stages // split.virtual - split.embedding_counts
    if split.num_layers and split.layout is None and first < depth:
        yield too_short_a_stage(first, depth)


def too_short_a_stage(num_layers: int, depth: int) -> str:
    """Return the error for a first stage with fewer layers than take features of the tower, which is there."""
    return (
        f"The first pipeline stage has {num_layers} layers; the first {depth} of this model take features of the "
        "vision tower, which is there. Give it as many (--decoder-first-pipeline-num-layers, "
        "--decoder-last-pipeline-num-layers), or fewer stages."
    )


def encoder_problems(args: Namespace) -> Iterator[str]:
    """Yield that engines keep a copy of a tower that is trained, where no push reaches it."""
    path = vars(args).get("sglang_config")
    if not path or args.debug_train_only or not args.train_vision_tower:
        return
    config = load_sglang_config(
        path, hf_checkpoint=args.hf_checkpoint, rollout_num_gpus_per_engine=args.rollout_num_gpus_per_engine
    )
    for model in config.models:
        if model.update_weights and any(group.worker_type == "encoder" for group in model.server_groups):
            yield (
                f"--sglang-config {path}: model {model.name}: it has encoders, which no push reaches, and "
                "--train-vision-tower changes the weights that they hold. Leave the group out, so that the engines "
                "compute images themselves, or drop the flag."
            )
