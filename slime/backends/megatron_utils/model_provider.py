"""Builds the model from the flags: its layers, its head, and which parameters are frozen."""

from __future__ import annotations

import inspect
import logging
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.flags.config_builders import transformer_config_from_args
from slime.backends.megatron_utils.flags.own_flags import load_spec
from slime.backends.megatron_utils.layers.layer_specs import BlockSpec, block_spec_of_flags
from slime.backends.megatron_utils.layers.mtp import GPTModelWithMtp, get_mtp_spec, without_mtp
from slime.backends.megatron_utils.layers.value_head import ValueHead, find_value_head
from slime.backends.megatron_utils.model_transform import ModelTransform
from slime.utils.distributed_utils import gather_objects
from slime.utils.errors import ConfigError
from slime.utils.misc import load_function
from slime.utils.plugins import PluginCall, call_plugin

logger = logging.getLogger(__name__)

ModelProvider = Callable[..., torch.nn.Module]

_INDEXER = r"self_attention\.(?:(?:wq_b|wk|k_norm|weights_proj)\.|(?:\w+\.)*\w*indexer)"
"""Pattern of the parameters of sparse attention's indexer."""


def get_model_provider(
    args: Namespace, role: str = "actor", transforms: Sequence[ModelTransform] = ()
) -> ModelProvider:
    """Return a function that builds this rank's part of the model.

    Args:
        role: "critic" replaces the vocabulary projection with a value head; any other role is a language model.

    Returns:
        ``provider(pre_process=True, post_process=True, vp_stage=None) -> GPTModel``, whose forward without labels
        gives the logits [1, T, vocab / tensor ranks] in the model's dtype.

    Raises:
        ConfigError: ``--spec`` cannot be imported.
        HookError: ``--custom-model-provider-path`` cannot be imported.
    """
    if args.custom_model_provider_path:
        build: ModelProvider = _custom_provider(args, role)
    else:
        build = _gpt_provider(args, role)

    def provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> torch.nn.Module:
        model = build(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        freeze_parameters(model, only_train=args.only_train_params_name_list, freeze=args.freeze_params_name_list)
        if args.freeze_indexer:
            freeze_indexer(model)
        embedding = getattr(model, "embedding", None)
        if args.recompute_granularity is not None and embedding is not None:
            # A recomputed block runs its backward pass only if one of its inputs needs a gradient.
            embedding.register_forward_hook(_needing_gradient)
        for transform in transforms:
            transform.after_build(model)
        vars(model)["transforms"] = transforms
        head = find_value_head([model])
        if head is not None and not head.weight.requires_grad:
            logger.warning(
                "The critic's value head is frozen: the lists of trained or frozen parameters cover it. Give "
                "the critic its own lists (--megatron-config-path)."
            )
        return model

    return provider


def _needing_gradient(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _named_in_whole_model(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield a stage's parameters, under names that count layers over all pipeline stages."""
    for name, parameter in chunk.named_parameters():
        if match := re.match(r"(.*\bdecoder\.layers)\.(\d+)(\..*)", name):
            layer = chunk.get_submodule(f"{match[1]}.{match[2]}")
            name = f"{match[1]}.{getattr(layer, 'layer_number', int(match[2]) + 1) - 1}{match[3]}"
        yield name, parameter


def freeze_parameters(
    model: torch.nn.Module, *, only_train: Iterable[str] | None = None, freeze: Iterable[str] | None = None
) -> None:
    """Freeze parameters by regular expressions over their names in the whole model."""
    only_train, freeze = list(only_train or ()), list(freeze or ())
    is_tied = getattr(model, "share_embeddings_and_output_weights", False)
    for name, parameter in _named_in_whole_model(model):
        if is_tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"  # this is its copy: both must be trained, or neither
        is_left_out = only_train and not any(re.search(pattern, name) for pattern in only_train)
        if is_left_out or any(re.search(pattern, name) for pattern in freeze):
            parameter.requires_grad_(False)


def check_trained_parameters(
    chunks: Sequence[torch.nn.Module], *, only_train: Sequence[str], freeze: Sequence[str]
) -> None:
    """Warn of patterns of frozen or trained parameters that match no parameter on any rank.

    Collective if there are patterns.

    Raises:
        ConfigError: the lists leave nothing to train.
    """
    if not only_train and not freeze:
        return
    names = [name for chunk in chunks for name, _ in _named_in_whole_model(chunk)]
    own = {pattern for pattern in (*only_train, *freeze) if any(re.search(pattern, name) for name in names)}
    is_trained = any(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters())
    everyone = gather_objects((own, is_trained))
    matched = set().union(*(patterns for patterns, _ in everyone))
    for flag, patterns in (("--only-train-params-name-list", only_train), ("--freeze-params-name-list", freeze)):
        if missing := [pattern for pattern in patterns if pattern not in matched]:
            logger.warning("%s: no parameter of the model matches %s.", flag, ", ".join(missing))
    if not any(trained for _, trained in everyone):
        raise ConfigError(
            "No parameter of the model is trained: --only-train-params-name-list is "
            f"{only_train or 'not given'}, --freeze-params-name-list {freeze or 'not given'}; they are regular "
            f"expressions over names such as {names[-1]}."
        )


def freeze_indexer(model: torch.nn.Module) -> None:
    """Freeze the indexer of sparse attention.

    Raises:
        ConfigError: the model has attention, but no indexer.
    """
    names = [name for name, _ in model.named_parameters() if ".self_attention." in name]
    if names and not any(re.search(_INDEXER, name) for name in names):
        raise ConfigError(
            "--freeze-indexer is given, but no parameter of the model's attention belongs to an indexer; give it with "
            "sparse attention only (docs/models.md)."
        )
    freeze_parameters(model, freeze=[_INDEXER])


def _gpt_provider(args: Namespace, role: str) -> ModelProvider:
    """Return the provider of the standard model: megatron-core's GPTModel with the layers of ``--spec``, or ours."""
    config = transformer_config_from_args(args)
    if role == "critic":
        config = without_mtp(config)
    spec_source = load_spec(args.spec) if args.spec else block_spec_of_flags

    def build(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
        spec = resolve_spec(spec_source, args, config, vp_stage)
        model_class: Callable[..., GPTModel] = GPTModel
        if config.mtp_num_layers:
            mtp_spec = get_mtp_spec(config, spec)
            model_class = partial(GPTModelWithMtp, mtp_spec=mtp_spec, trains_mtp=args.enable_mtp_training)
        model = model_class(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            # A critic has no vocabulary projection that could share the embedding's weights.
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights and role != "critic",
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            vp_stage=vp_stage,
        )
        if isinstance(spec, BlockSpec) and spec.finish is not None:
            spec.finish(model)
        if role == "critic" and post_process:
            model.output_layer = ValueHead(config, args.seed)
        return model

    return build


def _custom_provider(args: Namespace, role: str) -> ModelProvider:
    """Return the user's provider; ``vp_stage``, ``role`` and ``args`` are passed if its signature has them."""
    path = args.custom_model_provider_path
    call, function = PluginCall("--custom-model-provider-path", path), load_function(path)
    known = inspect.signature(function).parameters

    def build(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> torch.nn.Module:
        options = {"vp_stage": vp_stage, "role": role, "args": args}
        given = {name: value for name, value in options.items() if name in known}
        model = call_plugin(call, function, pre_process=pre_process, post_process=post_process, **given)
        if role == "critic" and post_process and not isinstance(model.output_layer, ValueHead):
            model.output_layer = ValueHead(model.config, args.seed)
        return model

    return build


def resolve_spec(
    source: Any, args: Namespace, config: TransformerConfig, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return the layer spec of one pipeline stage.

    A function is called with (config), (args, config) or (args, config, vp_stage), by its number of parameters.
    """
    if isinstance(source, (ModuleSpec, TransformerBlockSubmodules)):
        return source
    try:
        parameters = inspect.signature(source).parameters
    except TypeError:
        raise ConfigError(f"--spec {' '.join(args.spec)} is {type(source).__name__}; a function is needed.") from None
    if len(parameters) >= 3:
        return source(args, config, vp_stage)
    return source(args, config) if len(parameters) == 2 else source(config)
