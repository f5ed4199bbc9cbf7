"""The layers of DeepSeek-V4: several residual streams, attention to a window and compressed entries, experts.

    --spec slime_plugins.models.deepseek_v4 get_deepseek_v4_spec

Sizes and kinds of layers are read from the config.json of ``--hf-checkpoint`` (``family.py``).

attention.py           one shared key head, sinks, grouped output
compression.py         compressed entries, and the indexer that selects among them
hyper_connections.py   the streams
experts.py             scores, clamping, and experts chosen by a table
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from slime.backends.megatron_utils.flags.hf_config_check import read_hf_config
from slime.backends.megatron_utils.hf_to_megatron.tensors import HfTensors
from slime.backends.megatron_utils.layers.layer_specs import BlockSpec, RoutedLayer, get_block_spec
from slime.backends.megatron_utils.layers.router import RouterInputs
from slime.utils.errors import ConfigError
from slime_plugins.models.deepseek_v4.attention import CompressedAttention
from slime_plugins.models.deepseek_v4.experts import BoundedExperts, TableExperts, TableRouter, TokenInputs
from slime_plugins.models.deepseek_v4.family import V4Layers
from slime_plugins.models.deepseek_v4.hyper_connections import HyperConnection, StreamHead, add_output

__all__ = ["check_stages", "get_deepseek_v4_spec"]


def get_deepseek_v4_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> BlockSpec:
    """Return the layers of this pipeline stage.

    Args:
        args: complete flags; config.json and the expert tables of ``hf_checkpoint`` are read.
        config: built from ``args``.
        vp_stage: virtual pipeline stage on this rank.

    Raises:
        ConfigError: the flags describe another model, or an unsupported parallel layout.
    """
    if not args.hf_checkpoint:
        raise ConfigError("--hf-checkpoint is not given; its config.json says what layers DeepSeek-V4 has; give it.")
    check_stages(config, args.hf_checkpoint)
    layers = V4Layers.of(read_hf_config(args.hf_checkpoint))
    vars(config)["stage_width"] = layers.num_streams * config.hidden_size
    block = get_block_spec(config, vp_stage, partial(_v4_layer, layers))
    block.finish = partial(_finish, layers, args.hf_checkpoint)
    return block


def check_stages(config: TransformerConfig, hf_checkpoint: str | None, *_: Any) -> None:
    """Check flags and parallel layout before any GPU is used.

    Raises:
        ConfigError: the layers cannot be sharded or trained in this way.
    """
    tensor, modules = config.tensor_model_parallel_size, set(config.recompute_modules or ())
    groups = read_hf_config(hf_checkpoint)["o_groups"] if hf_checkpoint else tensor
    refused = (
        (groups % tensor, "--tensor-model-parallel-size", tensor,
         f"the {groups} groups of heads (o_groups) cannot be cut into as many parts", "give a divisor"),
        (config.mtp_num_layers, "--mtp-num-layers", config.mtp_num_layers,
         "MTP layers are not computed, as in transformers; exports keep those of --hf-checkpoint", "drop it"),
        (_coefficients(config), "--moe-aux-loss-coeff", config.moe_aux_loss_coeff,
         "balancing losses do not know the scores of DeepSeek-V4", "give 0"),
        (config.recompute_granularity == "selective" and modules - {"core_attn", "moe", "moe_act"},
         "--recompute-modules", sorted(modules), "core_attn, moe and moe_act can be recomputed apart", "give these"),
    )  # fmt: skip
    for is_refused, flag, value, why, what in refused:
        if is_refused:
            raise ConfigError(f"{flag} is {value}; {why}; {what}.")


def _coefficients(config: TransformerConfig) -> bool:
    given = config.moe_aux_loss_coeff
    return any(given) if isinstance(given, list) else bool(given)


def _v4_layer(layers: V4Layers, layer: ModuleSpec, number: int) -> ModuleSpec:
    """Return layer ``number``, from 1, with the parts of DeepSeek-V4."""
    attention = ModuleSpec(module=CompressedAttention, params={"layers": layers})
    experts = TableExperts if layers.chosen_by_table[number - 1] else BoundedExperts
    # No projection is fused with the norm before it, so neither are they on disk.
    submodules = replace(layer.submodules, self_attention=attention, mlp=experts, sharded_state_dict_keys_map={})
    return replace(layer, module=StreamLayer, params={**layer.params, "layers": layers}, submodules=submodules)


class StreamLayer(RoutedLayer):
    """A layer over residual streams [t, 1, m h]; the first layer gets a single stream, and the last one joins them."""

    head: Any = None
    """In the last layer, the module that joins the streams; the model owns it."""

    def __init__(
        self, config: TransformerConfig, submodules: Any, *args: Any, layers: V4Layers, **options: Any
    ) -> None:
        """Build with megatron-core's arguments for layers, and the settings of the layers from config.json."""
        super().__init__(config, submodules, *args, **options)
        self.num_streams = layers.num_streams
        sizes: dict[str, Any] = {
            "num_streams": layers.num_streams,
            "steps": layers.sinkhorn_steps,
            "eps": layers.hyper_epsilon,
        }
        self.attention_streams = HyperConnection(config, **sizes)
        self.mlp_streams = HyperConnection(config, **sizes)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Map streams [t, 1, m h] to streams; ``packed_seq_params`` has the token ids and the routers' inputs."""
        streams = hidden_states.unflatten(-1, (-1, self.config.hidden_size))
        if self.layer_number == 1:
            streams = streams.expand(-1, -1, self.num_streams, -1)
        x, after, mix = self.attention_streams(streams)
        output, _ = self.self_attention(self.input_layernorm(x), packed_seq_params=packed_seq_params)
        streams = add_output(streams, output, after, mix)
        x, after, mix = self.mlp_streams(streams)
        inputs = RouterInputs.of(packed_seq_params)
        tokens = TokenInputs(inputs.samples, inputs.replay, packed_seq_params.token_ids[0])
        output, _ = self.mlp(self.pre_mlp_layernorm(x), padding_mask=tokens)
        streams = add_output(streams, output, after, mix)
        if self.head is not None:
            return self.head(streams), None
        flat = streams.flatten(-2)
        # The schedules free a stage's output once it is sent; a view would keep its memory.
        return make_viewless_tensor(flat, requires_grad=flat.requires_grad, keep_graph=True), None


def _finish(layers: V4Layers, folder: str, model: Any) -> None:
    """Add the modules outside of the layers to the built model: the stream head, and the expert tables."""
    model.register_forward_pre_hook(_keep_tokens, with_kwargs=True)
    last = model.decoder.layers[-1] if len(model.decoder.layers) else None
    if last is not None and last.layer_number == model.config.num_layers:
        model.stream_head = StreamHead(model.config, num_streams=layers.num_streams, eps=layers.hyper_epsilon)
        vars(last)["head"] = model.stream_head
    routers = {layer.layer_number: layer.mlp.router for layer in model.decoder.layers}
    routers = {number: router for number, router in routers.items() if isinstance(router, TableRouter)}
    if routers:
        with HfTensors(folder) as tensors:
            for number, router in routers.items():
                router.take_table(tensors.get(f"layers.{number - 1}.ffn.gate.tid2eid"))


def _keep_tokens(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    options["packed_seq_params"].token_ids = options["input_ids"]
