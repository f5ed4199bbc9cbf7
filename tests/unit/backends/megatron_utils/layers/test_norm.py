"""The norm against its formula, and the parameter attributes that megatron-core needs."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from slime.backends.megatron_utils.layers.norm import Norm


def config(**changes: object) -> SimpleNamespace:
    settings: dict[str, object] = {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "sequence_parallel": False,
    }
    return SimpleNamespace(**{**settings, **changes})


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    norm = Norm(config(), 2, eps=0.0)
    norm.weight.data = torch.tensor([1.0, 2.0])
    # sqrt((3^2 + 4^2) / 2) = 3.5355
    assert torch.allclose(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[3.0, 8.0]]) / 12.5**0.5)
    assert norm.bias is None


def test_layer_norm_subtracts_the_mean_and_adds_its_bias() -> None:
    norm = Norm(config(normalization="LayerNorm"), 2, eps=0.0)
    assert norm.bias is not None
    norm.bias.data.fill_(0.5)
    assert torch.allclose(norm(torch.tensor([[1.0, 3.0]])), torch.tensor([[-0.5, 1.5]]))


def test_a_zero_centred_weight_starts_at_zero_and_counts_from_one() -> None:
    x = torch.randn(3, 4)
    centred = Norm(config(layernorm_zero_centered_gamma=True), 4)
    assert not centred.weight.any()
    assert torch.allclose(centred(x), Norm(config(), 4)(x))
