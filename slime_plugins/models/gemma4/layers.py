"""The layers of Gemma 4, text: Gemma 3's, with heads of two widths, values that may be keys, and a factor for each.

    --spec slime_plugins.models.gemma4 get_gemma4_spec --post-self-attn-layernorm --post-mlp-layernorm --qk-layernorm
    --softmax-scale 1 --window-size 1023,0 --window-attn-skip-freq 6

What differs from layer to layer is read from config.json of ``--hf-checkpoint`` (``family.py``).  In the small
models each layer adds a gated embedding of the token that is its own, and the last layers attend to the keys and
values of the last layer of their kind that has any; both need all layers on one pipeline stage.  In the model with
experts these stand beside the MLP (``--moe-shared-expert-intermediate-size``), each with norms in front and behind.
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
        args: ``hf_checkpoint``, whose config.json says what differs from layer to layer; the norms.
        config: made from them.
        vp_stage: which virtual stage of this rank.

    Raises:
        ConfigError: the flags describe another model, or a layout that this one cannot have.
    """
    if not args.hf_checkpoint:
        raise ConfigError("--hf-checkpoint is not given; its config.json says what layers Gemma 4 has; give it.")
    check_stages(args, config)
    hf_config = read_hf_config(args.hf_checkpoint)
    config.hetereogenous_dist_checkpoint = True
    change = partial(_gemma4_layer, config, Gemma4Layers.of(hf_config), hf_config["hidden_size_per_layer_input"] or 0)
    block = get_block_spec(config, vp_stage, change, post_self_attn_layernorm=True, post_mlp_layernorm=True)
    block.finish = partial(_finish, hf_config)
    return block


def check_stages(args: Namespace, config: TransformerConfig) -> None:
    """Check, before a GPU is taken, flags and layout.

    Raises:
        ConfigError: the flags describe another model, or heads or stages that cannot be cut so.
    """
    if config.window_size is None or not (args.post_self_attn_layernorm and args.post_mlp_layernorm):
        raise ConfigError(
            "--window-size, --post-self-attn-layernorm or --post-mlp-layernorm is not given; Gemma 4 has all three; "
            "source scripts/models/gemma4-31B.sh."
        )
    if config.moe_shared_expert_overlap:
        raise ConfigError(
            "--moe-shared-expert-overlap is given; Gemma 4's MLP and its experts do not read the same norm; drop it."
        )
    if not args.hf_checkpoint:
        return
    hf_config = read_hf_config(args.hf_checkpoint)
    layers, tensor = Gemma4Layers.of(hf_config), config.tensor_model_parallel_size
    for groups, _ in (layers.window_heads, layers.full_heads):
        if groups % tensor:
            raise ConfigError(
                f"--tensor-model-parallel-size is {tensor}; this model has layers with {groups} heads of keys, which "
                "cannot be cut into as many parts; give a divisor."
            )
    for key, what in (
        ("hidden_size_per_layer_input", "the layers take embeddings of the first stage"),
        ("num_kv_shared_layers", "the last layers attend to the keys of earlier ones"),
    ):
        if hf_config[key] and config.pipeline_model_parallel_size > 1:
            raise ConfigError(
                f"--pipeline-model-parallel-size is {config.pipeline_model_parallel_size}; {key} of config.json is "
                f"{hf_config[key]}: {what}, and stages send hidden states alone; give 1."
            )


def _gemma4_layer(
    config: TransformerConfig, layers: Gemma4Layers, per_layer_size: int, layer: ModuleSpec, number: int
) -> ModuleSpec:
    """Return layer ``number``, from 1, with the parts that only Gemma 4 has."""
    attention = layer.submodules.self_attention
    attention = replace(attention, module=Gemma4Attention, params={**attention.params, "layers": layers})
    # The projections that follow are not joined, so neither are the norms on disk.
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
    """Attention of one layer: its own heads and angles, values normed without a weight; its keys may be another's."""

    _params: Any = None
    """Packing of the micro-batch in this forward call, which carries the keys that layers share."""

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
        """Take what megatron-core passes to any attention, and what config.json says of the layers."""
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
        """Attend with angles for as many positions as the model's have."""
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
        """Return query, key and value, [t, 1, heads, head dimension], the first two rotated."""
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
        assert self._tables is not None, "Gemma 4 takes packed sequences"
        return apply_rotary(x.squeeze(1), self._tables, interleaved=False).unsqueeze(1)


def lend(params: Any, name: str, x: Tensor, *, is_again: bool) -> Tensor:
    """Leave ``x`` on the packing of a micro-batch for later layers, and return it for this one.

    The others get a copy without a graph, so that each may run its backward pass on its own, as recomputed layers do;
    what they add up in its gradient joins the gradient of what is returned.

    Args:
        is_again: the forward pass was made before, and later layers used what it left.
    """
    kept = vars(params)
    if not (is_again and name in kept):
        kept[name] = x.detach().requires_grad_()
    return _Lent.apply(x, (kept[name],))  # no input of the graph: its gradient must be there before


class _Lent(torch.autograd.Function):
    """The identity, whose gradient adds the gradient of a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copied: tuple[Tensor]) -> Tensor:
        (ctx.copied,) = copied
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        of_copy, ctx.copied.grad = ctx.copied.grad, None
        return grads[0] if of_copy is None else grads[0] + of_copy, None


class ScaledRouter(Router):
    """Reads normed hidden states times a learned factor; the weights of the chosen have a factor for each expert."""

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
        """Map logits [t, 1, E] to weights and choices, both [t, E]."""
        weights, chosen = super().routing(logits, padding_mask)
        return weights * self.per_expert_scale, chosen


class Gemma4Experts(RoutedExperts):
    """An MLP beside experts, added up; each branch has norms in front and behind, and the router another in front.

    norm(mlp(norm(h))) + norm(sum over the chosen of weight * expert(norm(h)))
    """

    router_class = ScaledRouter

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        """Take what megatron-core passes to any experts."""
        own = copy.copy(config)
        own.activation_func, own.bias_activation_fusion = gelu, False
        super().__init__(own, *args, **options)
        for branch in ("shared", "experts"):
            for place in ("pre", "post"):
                norm = Norm(config, config.hidden_size, config.layernorm_epsilon)
                self.add_module(f"{place}_{branch}_layernorm", norm)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        """Run the MLP with its norms."""
        output: Tensor = self.post_shared_layernorm(
            super().shared_experts_compute(self.pre_shared_layernorm(hidden_states))
        )
        return output

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """Norm what goes to the experts, after the router has read it."""
        return super().preprocess(self.pre_experts_layernorm(hidden_states), probs, routing_map)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Norm what the experts gave, and add the MLP's."""
        normed: Tensor = self.post_experts_layernorm(super().postprocess(output, None))
        return normed if shared_expert_output is None else normed + shared_expert_output


class Gemma4Layer(SandwichLayer):
    """A layer whose output is multiplied by a constant of the checkpoint; its own embeddings may be added to it.

    h = h + norm(project(gelu(gate(h)) * embedding of the token in this layer))
    h = h * layer_scalar
    """

    def __init__(
        self, config: TransformerConfig, submodules: Any, *args: Any, per_layer_size: int, **options: Any
    ) -> None:
        """Take what megatron-core passes to any layer, and the width of its embeddings, 0 for none."""
        super().__init__(config, submodules, *args, **options)
        ones = torch.ones(1, **cpu_platform.of_new_parameters(config))
        self.layer_scalar = torch.nn.Parameter(ones, requires_grad=False)
        self.per_layer_size = per_layer_size
        if per_layer_size:
            self.per_layer_input_gate = ReplicatedLinear(config.hidden_size, per_layer_size, config=config)
            self.per_layer_projection = ReplicatedLinear(per_layer_size, config.hidden_size, config=config)
            self.post_per_layer_input_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Run the layer; its embeddings are on ``packed_seq_params``."""
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
    """The layer that reads the embedding, and computes the embeddings of all layers."""

    per_layer_inputs: Any = None
    """What computes them; the model holds it."""

    def take_inputs(self, hidden_states: Tensor, params: Any) -> Tensor:
        """Return the embeddings of this layer, those of the others left on ``params``."""
        whole = self.per_layer_inputs(hidden_states, params.token_ids)
        is_again = self.config.recompute_granularity == "full" and torch.is_grad_enabled()
        return lend(params, "per_layer_inputs", whole, is_again=is_again)[..., 0, :]


class PerLayerInputs(MegatronModule):
    """Embeddings of each token for each layer: a table, and a projection of the first layer's input.

    (norm(project(x) / sqrt(h)) + sqrt(p) * table[token]) / sqrt(2), p wide in each layer.
    """

    def __init__(self, config: TransformerConfig, *, rows: int, width: int, tp_group: Any) -> None:
        """Create the table, of ``rows`` tokens, which tensor parallelism cuts, and the projection, which is whole."""
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
        """Return [t, 1, layers, width] for the scaled embedding [t, 1, h] and the tokens [1, all of t]."""
        table = self.embedding(token_ids)
        if not self.config.sequence_parallel:
            table = table.transpose(0, 1)
        table = table * torch.tensor(self.width**0.5, dtype=table.dtype, device=table.device)
        projected = self.projection(hidden_states) * self.config.hidden_size**-0.5
        by_layer = self.norm(projected.unflatten(-1, (-1, self.width)))
        return (by_layer + table.unflatten(-1, (-1, self.width))) * 2.0**-0.5


def _finish(hf_config: Mapping[str, Any], model: Any) -> None:
    """Give the built model what is outside of its layers: embeddings by layer, a soft cap on the logits."""
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
    """Keeps its input alone, some rows at a time in fp32: there are 262,144 logits for each token."""

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
"""Tokens whose logits are capped at once."""


def _tanh(logits: Tensor, cap: float) -> Tensor:
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / cap).tanh_()
