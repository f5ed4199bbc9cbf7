"""The layers of Gemma 4's text model: Gemma 3's, with two head widths, values that may be the keys, and layer scalars.

    --spec slime_plugins.models.gemma4 get_gemma4_spec --post-self-attn-layernorm --post-mlp-layernorm --qk-layernorm
    --softmax-scale 1 --window-size 1023,0 --window-attn-skip-freq 6

Per-layer settings are read from config.json of ``--hf-checkpoint`` (``family.py``).  In the small models each layer
adds its own gated token embedding, and the last layers attend to the keys and values of the last layer of their kind
that computes any; both need all layers on one pipeline stage.  In the model with experts, experts and MLP
(``--moe-shared-expert-intermediate-size``) run side by side, each with a norm before and after.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from slime.backends.megatron_utils import cpu_platform

# isort: split
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.attention import Attention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.backends.megatron_utils.flags.hf_config_check import read_hf_config
from slime.backends.megatron_utils.layers.attention import PackedSelfAttention
from slime.backends.megatron_utils.layers.latent_attention import ReplicatedLinear
from slime.backends.megatron_utils.layers.layer_specs import BlockSpec, RoutedExperts, SandwichLayer, get_block_spec
from slime.backends.megatron_utils.layers.norm import Norm
from slime.backends.megatron_utils.layers.rotary import apply_rotary
from slime.backends.megatron_utils.layers.router import Router
from slime.utils.errors import ConfigError
from slime_plugins.models.gemma3.family import LOCAL_ROTARY_BASE
from slime_plugins.models.gemma3.layers import FirstLayer, GeluMlp, gelu, plain_angles
from slime_plugins.models.gemma4.family import Gemma4Layers


def get_gemma4_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> BlockSpec:
    """Return the layers of this pipeline stage.

    Args:
        args: ``hf_checkpoint``, whose config.json has the per-layer settings, and the flags of the norms.
        config: the transformer config built from ``args``.
        vp_stage: virtual pipeline stage of this rank.

    Raises:
        ConfigError: the flags describe another model, or a layout that this model does not support.
    """
    if not args.hf_checkpoint:
        raise ConfigError("--hf-checkpoint is not given; Gemma 4's layers are built from its config.json; give it.")
    has_post_norms = args.post_self_attn_layernorm and args.post_mlp_layernorm
    check_stages(config, args.hf_checkpoint, has_post_norms)
    hf_config = read_hf_config(args.hf_checkpoint)
    config.hetereogenous_dist_checkpoint = True
    change = partial(_gemma4_layer, config, Gemma4Layers.of(hf_config), hf_config["hidden_size_per_layer_input"] or 0)
    block = get_block_spec(config, vp_stage, change, post_self_attn_layernorm=True, post_mlp_layernorm=True)
    block.finish = partial(_finish, hf_config)
    return block


def check_stages(config: TransformerConfig, hf_checkpoint: str | None, has_post_norms: bool) -> None:
    """Check flags and layout, before any GPU is reserved.

    Raises:
        ConfigError: the flags describe another model, or a tensor- or pipeline-parallel size that cannot split it.
    """
    if config.window_size is None or not has_post_norms:
        raise ConfigError(
            "--window-size, --post-self-attn-layernorm or --post-mlp-layernorm is not given; Gemma 4 has all three; "
            "source scripts/models/gemma4-31B.sh."
        )
    if config.moe_shared_expert_overlap:
        raise ConfigError(
            "--moe-shared-expert-overlap is given; Gemma 4's MLP and experts have different input norms; drop it."
        )
    if not hf_checkpoint:
        return
    hf_config = read_hf_config(hf_checkpoint)
    layers, tensor = Gemma4Layers.of(hf_config), config.tensor_model_parallel_size
    for groups, _ in (layers.window_heads, layers.full_heads):
        if groups % tensor:
            raise ConfigError(
                f"--tensor-model-parallel-size is {tensor}; this model has layers with {groups} key heads, which "
                "cannot be split into that many parts; give a divisor."
            )
    for key, what in (
        ("hidden_size_per_layer_input", "the first stage computes the per-layer embeddings"),
        ("num_kv_shared_layers", "the last layers attend to the keys of earlier ones"),
    ):
        if hf_config[key] and config.pipeline_model_parallel_size > 1:
            raise ConfigError(
                f"--pipeline-model-parallel-size is {config.pipeline_model_parallel_size}; {key} of config.json is "
                f"{hf_config[key]}: {what}, but stages send only hidden states; give 1."
            )


def _gemma4_layer(
    config: TransformerConfig, layers: Gemma4Layers, per_layer_size: int, layer: ModuleSpec, number: int
) -> ModuleSpec:
    """Return layer ``number``, counted from 1, with Gemma 4's modules."""
    attention = layer.submodules.self_attention
    attention = replace(attention, module=Gemma4Attention, params={**attention.params, "layers": layers})
    # The projections after the norms are not fused, so checkpoints store the norms separately.
    submodules = replace(layer.submodules, self_attention=attention, sharded_state_dict_keys_map={})
    if submodules.mlp is RoutedExperts:
        submodules = replace(submodules, pre_mlp_layernorm=IdentityOp, mlp=Gemma4Experts)
    else:
        width = (config.ffn_hidden_size or 0) * layers.mlp_factor(number)
        mlp = replace(submodules.mlp, module=GeluMlp, params={"ffn_hidden_size": width})
        submodules = replace(submodules, mlp=mlp)
    module = FirstGemma4Layer if number == 1 else Gemma4Layer
    return replace(
        layer, module=module, params={**layer.params, "per_layer_size": per_layer_size}, submodules=submodules
    )


class Gemma4Attention(PackedSelfAttention):
    """Attention with per-layer heads and rotary angles, weightless value norm, and optionally another layer's keys."""

    _params: Any = None
    """``PackedSeqParams`` of this forward call; also carries the keys and values that layers share."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        layers: Gemma4Layers,
    ) -> None:
        """Take megatron-core's attention arguments, and ``layers``, the per-layer settings of config.json."""
        own = copy.copy(config)
        own.num_query_groups, own.kv_channels = groups, width = layers.heads(layer_number)
        Attention.__init__(self, own, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection)
        self.source = layers.source(layer_number)
        self.is_lending = any(layers.source(n) == layer_number for n in range(layer_number + 1, len(layers.kinds) + 1))
        has_window = layers.has_window(layer_number)
        self.tables_name = f"{layers.kinds[layer_number - 1]}_tables"
        self.rotary_base = LOCAL_ROTARY_BASE if has_window else layers.full_rotary_base
        self.num_turning = width // 2 if has_window else int(layers.full_turning * width // 2)

        def project(heads: int) -> Any:
            return submodules.linear_qkv(
                own.hidden_size, heads * width, config=own, init_method=own.init_method, gather_output=False,
                bias=False, skip_bias_add=False, is_expert=False, tp_comm_buffer_name="qkv", tp_group=self.tp_group,
            )  # fmt: skip

        self.linear_q = project(own.num_attention_heads)
        self.q_layernorm = Norm(own, width, own.layernorm_epsilon)
        has_keys = self.source == layer_number
        self.linear_k = project(groups) if has_keys else None
        self.k_layernorm = Norm(own, width, own.layernorm_epsilon) if has_keys else None
        self.linear_v = project(groups) if layers.has_values(layer_number) else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with this layer's rotary tables, for as many positions as the model's tables have."""
        given = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        own = plain_angles(
            given.size(0), self.config.kv_channels, self.rotary_base, num_turning=self.num_turning, device=given.device
        )
        self._params = packed_seq_params
        try:
            return super().forward(
                hidden_states,
                attention_mask,
                *args,
                rotary_pos_emb=own,
                packed_seq_params=packed_seq_params,
                **options,
            )
        finally:
            self._params = None

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **unused: Any) -> tuple[Tensor, ...]:
        """Return query, key and value, each [t, 1, heads, head dimension]; query and key are rotated."""
        query = self._rotated(self.q_layernorm(self._heads(self.linear_q, hidden_states)))
        if self.linear_k is None or self.k_layernorm is None:
            return (query, *(vars(self._params)[f"{part}_of_{self.source}"] for part in ("keys", "values")))
        raw_key = self._heads(self.linear_k, hidden_states)
        raw_value = raw_key if self.linear_v is None else self._heads(self.linear_v, hidden_states)
        key = self._rotated(self.k_layernorm(raw_key))
        wide = raw_value.to(torch.promote_types(raw_value.dtype, torch.float32))
        value = F.rms_norm(wide, wide.shape[-1:], eps=self.config.layernorm_epsilon).to(raw_value.dtype)
        if self.is_lending:
            is_again = self.config.recompute_granularity == "full" and torch.is_grad_enabled()
            key = lend(self._params, f"keys_of_{self.layer_number}", key, is_again=is_again)
            value = lend(self._params, f"values_of_{self.layer_number}", value, is_again=is_again)
        return query, key, value

    def _heads(self, linear: Any, hidden_states: Tensor) -> Tensor:
        return linear(hidden_states)[0].unflatten(-1, (-1, self.config.kv_channels))

    def _rotated(self, x: Tensor) -> Tensor:
        assert self._tables is not None, "Gemma 4 needs packed sequences"
        return apply_rotary(x.squeeze(1), self._tables, interleaved=False).unsqueeze(1)


def lend(params: Any, name: str, x: Tensor, *, is_again: bool) -> Tensor:
    """Store ``x`` in the micro-batch's ``params`` for later layers, and return it for this one.

    Later layers read a detached copy, so that each can run its own backward pass, as recomputed layers do.  The
    gradient that accumulates in the copy is added to the gradient of the returned tensor.

    Args:
        is_again: True in a recomputed forward pass: later layers have used the stored copy, so it is kept.
    """
    kept = vars(params)
    if not (is_again and name in kept):
        kept[name] = x.detach().requires_grad_()
    # In a tuple, autograd does not treat the copy as an input; its gradient is complete before this node's backward.
    return _Lent.apply(x, (kept[name],))


class _Lent(torch.autograd.Function):
    """The identity; its backward pass adds the gradient accumulated in a detached copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copied: tuple[Tensor]) -> Tensor:
        (ctx.copied,) = copied
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        of_copy, ctx.copied.grad = ctx.copied.grad, None
        return grads[0] if of_copy is None else grads[0] + of_copy, None


class ScaledRouter(Router):
    """A router with a learned input scale after a norm, and a learned output scale for each expert."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config, pg_collection)
        for name, size in (("scale", config.hidden_size), ("per_expert_scale", config.num_moe_experts)):
            factors = torch.nn.Parameter(torch.ones(size, **cpu_platform.of_new_parameters(config)))
            vars(factors)["sequence_parallel"] = config.sequence_parallel
            self.register_parameter(name, factors)

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 - megatron-core's name
        """Map hidden states [t, 1, h] to logits [t, 1, E]."""
        size = self.config.hidden_size
        factor = self.scale * torch.tensor(size**-0.5, dtype=self.scale.dtype)  # rounded as engines round it
        normed = F.rms_norm(input.to(factor.dtype), (size,), factor, self.config.layernorm_epsilon)
        return super().gating(normed.to(input.dtype))

    def routing(self, logits: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
        """Map logits [t, 1, E] to expert weights and the routing map, both [t, E]."""
        weights, chosen = super().routing(logits, padding_mask)
        return weights * self.per_expert_scale, chosen


class Gemma4Experts(RoutedExperts):
    """The sum of an MLP and experts; each branch has a norm before and after, and the router has its own input norm.

    norm(mlp(norm(h))) + norm(sum over chosen experts of weight * expert(norm(h)))
    """

    router_class = ScaledRouter

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        """Take megatron-core's arguments of an MoE layer."""
        own = copy.copy(config)
        own.activation_func, own.bias_activation_fusion = gelu, False
        super().__init__(own, *args, **options)
        for branch in ("shared", "experts"):
            for place in ("pre", "post"):
                norm = Norm(config, config.hidden_size, config.layernorm_epsilon)
                self.add_module(f"{place}_{branch}_layernorm", norm)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        """Run the MLP between its norms."""
        output: Tensor = self.post_shared_layernorm(
            super().shared_experts_compute(self.pre_shared_layernorm(hidden_states))
        )
        return output

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """Norm the experts' input, which the router reads without this norm."""
        return super().preprocess(self.pre_experts_layernorm(hidden_states), probs, routing_map)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Norm the experts' output and add the MLP's."""
        normed: Tensor = self.post_experts_layernorm(super().postprocess(output, None))
        return normed if shared_expert_output is None else normed + shared_expert_output


class Gemma4Layer(SandwichLayer):
    """A layer that may add its own token embedding, and multiplies its output by a constant of the checkpoint.

    h = h + norm(project(gelu(gate(h)) * this layer's embedding of the token))
    h = h * layer_scalar
    """

    def __init__(
        self, config: TransformerConfig, submodules: Any, *args: Any, per_layer_size: int, **options: Any
    ) -> None:
        """Take megatron-core's arguments of a layer, and the width of the per-layer embedding (0: none)."""
        super().__init__(config, submodules, *args, **options)
        ones = torch.ones(1, **cpu_platform.of_new_parameters(config))
        self.layer_scalar = torch.nn.Parameter(ones, requires_grad=False)
        self.per_layer_size = per_layer_size
        if per_layer_size:
            self.per_layer_input_gate = ReplicatedLinear(config.hidden_size, per_layer_size, config=config)
            self.per_layer_projection = ReplicatedLinear(per_layer_size, config.hidden_size, config=config)
            self.post_per_layer_input_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Run the layer; ``packed_seq_params`` carries the per-layer embeddings."""
        inputs = self.take_inputs(hidden_states, options["packed_seq_params"]) if self.per_layer_size else None
        output, context = super().forward(hidden_states, *args, **options)
        if inputs is not None:
            gated = gelu(self.per_layer_input_gate(output)) * inputs
            output = output + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return output * self.layer_scalar, context

    def take_inputs(self, hidden_states: Tensor, params: Any) -> Tensor:
        """Return the embeddings of this layer, [t, 1, width]."""
        whole: Tensor = params.per_layer_inputs
        return whole[..., self.layer_number - 1, :]


class FirstGemma4Layer(FirstLayer, Gemma4Layer):
    """The first layer, which also computes the per-layer embeddings of all layers."""

    per_layer_inputs: Any = None
    """The model's ``PerLayerInputs``; the model owns it."""

    def take_inputs(self, hidden_states: Tensor, params: Any) -> Tensor:
        """Return the embeddings of this layer, [t, 1, width]; store the others in ``params``."""
        whole = self.per_layer_inputs(hidden_states, params.token_ids)
        is_again = self.config.recompute_granularity == "full" and torch.is_grad_enabled()
        return lend(params, "per_layer_inputs", whole, is_again=is_again)[..., 0, :]


class PerLayerInputs(MegatronModule):
    """Per-layer token embeddings, from a table and a projection of the first layer's input.

    (norm(project(x) / sqrt(h)) + sqrt(p) * table[token]) / sqrt(2), where p is the width per layer.
    """

    def __init__(self, config: TransformerConfig, *, rows: int, width: int, tp_group: Any) -> None:
        """Create the table of ``rows`` tokens, split by tensor parallelism, and the replicated projection."""
        super().__init__(config=config)
        columns = config.num_layers * width
        self.width = width
        self.embedding = VocabParallelEmbedding(
            rows, columns, init_method=config.init_method, reduce_scatter_embeddings=config.sequence_parallel,
            config=config, tp_group=tp_group,
        )  # fmt: skip
        self.projection = ReplicatedLinear(config.hidden_size, columns, config=config)
        self.norm = Norm(config, width, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor, token_ids: Tensor) -> Tensor:
        """Return embeddings [t, 1, layers, width].

        Args:
            hidden_states: the scaled token embedding, [t, 1, h]; split over ranks under sequence parallelism.
            token_ids: all tokens, [1, t].
        """
        table = self.embedding(token_ids)
        if not self.config.sequence_parallel:
            table = table.transpose(0, 1)
        table = table * torch.tensor(self.width**0.5, dtype=table.dtype, device=table.device)
        projected = self.projection(hidden_states) * self.config.hidden_size**-0.5
        by_layer = self.norm(projected.unflatten(-1, (-1, self.width)))
        return (by_layer + table.unflatten(-1, (-1, self.width))) * 2.0**-0.5


def _finish(hf_config: Mapping[str, Any], model: Any) -> None:
    """Add the parts outside the layers to the built model: per-layer embeddings and the soft cap on logits."""
    cap, width = hf_config["final_logit_softcapping"], hf_config["hidden_size_per_layer_input"]
    if cap and model.post_process:
        model.output_layer.register_forward_hook(lambda _, inputs, output: (soft_cap(output[0], cap), *output[1:]))
    if width:
        rows = hf_config["vocab_size_per_layer_input"]
        model.per_layer_inputs = PerLayerInputs(model.config, rows=rows, width=width, tp_group=model.pg_collection.tp)
        vars(model.decoder.layers[0])["per_layer_inputs"] = model.per_layer_inputs
        model.register_forward_pre_hook(_keep_tokens, with_kwargs=True)


def _keep_tokens(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    options["packed_seq_params"].token_ids = options["input_ids"]


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), computed in fp32 (fp64 for fp64), in the dtype of ``logits``."""
    return _SoftCap.apply(logits, cap)


class _SoftCap(torch.autograd.Function):
    """Saves only its input, and works on a few rows at a time in fp32: there are 262,144 logits per token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.cap = cap
        out = torch.empty_like(logits)
        for rows, target in zip(logits.split(ROWS), out.split(ROWS), strict=True):
            target.copy_(_tanh(rows, cap).mul_(cap))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        out = torch.empty_like(grads[0])
        for rows, grad, target in zip(*(x.split(ROWS) for x in (logits, grads[0], out)), strict=True):
            target.copy_(grad * (1 - _tanh(rows, ctx.cap).square_()))
        return out, None


ROWS = 512
"""Number of tokens whose logits are capped at a time."""


def _tanh(logits: Tensor, cap: float) -> Tensor:
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / cap).tanh_()
