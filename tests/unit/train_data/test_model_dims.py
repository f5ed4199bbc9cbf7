"""Forward FLOPs against products counted by hand."""

from argparse import Namespace
from dataclasses import replace

from slime.backends.megatron_utils.flags.model_dims import model_dims

DENSE = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "kv_channels": 4,
    "ffn_hidden_size": 16,
    "vocab_size": 10,
    "swiglu": True,
}


def test_dense_model_counts_each_matrix_once():
    length = 3
    qkv = 2 * 3 * 8 * (2 * 4) + 4 * 3 * 8 * (1 * 4)
    attention = 2 * (2 * 3 * 3 * 4)
    output = 2 * 3 * 8 * 8
    mlp = 6 * 3 * 8 * 16
    head = 2 * 3 * 8 * 10
    assert model_dims(Namespace(**DENSE)).forward_flops(length) == 2 * (qkv + attention + output + mlp) + head


def test_expert_layers_follow_the_pattern_and_count_visited_experts_only():
    moe = {"num_experts": 64, "moe_router_topk": 2, "moe_ffn_hidden_size": 4, "moe_shared_expert_intermediate_size": 5}
    dense = model_dims(Namespace(**DENSE)).forward_flops(7)
    for pattern, num_moe in (([0, 1], 1), (2, 1), (1, 2), ([0, 0], 0)):
        model = model_dims(Namespace(**DENSE, **moe, moe_layer_freq=pattern))
        assert sum(model.is_moe) == num_moe
        assert model.forward_flops(7) == dense + num_moe * 6 * 7 * 8 * ((2 * 4 + 5) - 16)


def test_latent_attention_counts_its_low_rank_projections():
    dims = {"q_lora_rank": 3, "kv_lora_rank": 5, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 6}
    model = model_dims(Namespace(**{**DENSE, "num_layers": 1}, **dims, multi_latent_attention=True))
    query = 2 * 7 * 3 * (8 + 2 * (4 + 2))
    key_value = 2 * 7 * (5 * (8 + 2 * (4 + 6)) + 8 * 2)
    attention = 2 * 7 * 7 * (4 + 2) + 2 * 7 * 7 * 6
    output = 2 * 7 * 2 * 6 * 8
    assert model.forward_flops(7) == query + key_value + attention + output + 6 * 7 * 8 * 16 + 2 * 7 * 8 * 10


def test_linear_attention_has_no_square_and_a_gate_widens_the_query():
    sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 3}
    args = Namespace(**DENSE, **sizes, linear_value_head_dim=5, linear_attention_freq=2, attention_output_gate=True)
    model = model_dims(args)
    assert sum(model.is_linear) == 1
    # q 3, k 3, v 10, z 10, b 2, a 2; the output; reads and writes of two states of 3 x 5
    linear = 2 * 7 * 8 * (3 + 3 + 10 + 10 + 2 + 2) + 2 * 7 * 10 * 8 + 7 * 2 * 3 * (2 * 3 * 5)
    full = 2 * 7 * 8 * (2 * 8 + 2 * 4) + 2 * 7 * 7 * 8 + 2 * 7 * 8 * 8
    rest = 2 * 6 * 7 * 8 * 16 + 2 * 7 * 8 * 10
    assert model.forward_flops(7) == linear + full + rest


def test_layers_of_one_half_count_that_half_and_an_mlp_without_a_gate_two_matrices():
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3}
    args = Namespace(**{**DENSE, "num_layers": 3, "swiglu": False}, **sizes, linear_value_head_dim=5)
    args.linear_attention_freq, args.num_experts = [1, 0, 0], None
    halves = (True, True, False)
    fields = tuple((("attends", attends), ("has_mlp", not attends)) for attends in halves)
    model = replace(model_dims(args), is_state_space=True, layer_fields=fields)
    layers = [model.of_layer(layer) for layer in range(4)]
    assert [one.attends for one in layers] == [*halves, True] and not layers[1].has_mlp and model.num_kv_layers == 1
    mamba = 2 * 7 * 8 * (6 + 6 + 20 + 20 + 4) + 2 * 7 * 20 * 8 + 7 * 4 * 2 * (2 * 3 * 5)
    attention = 2 * 7 * 8 * (2 * 4 + 2 * 4) + 2 * 7 * 7 * 8 + 2 * 7 * 8 * 8
    assert model.forward_flops(7) == mamba + attention + 2 * 2 * 7 * 8 * 16 + 2 * 7 * 8 * 10


def test_layers_of_other_widths_count_as_often_as_they_are():
    plain = model_dims(Namespace(**{**DENSE, "num_layers": 3}))
    wide = (("ffn_hidden_size", 32),)
    model = replace(plain, layer_fields=(wide, (), wide))
    assert model.forward_flops(7) == plain.forward_flops(7) + 2 * 6 * 7 * 8 * 16
