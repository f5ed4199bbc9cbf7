"""Faults of the megatron-core 0.16.1 wheel that show when TransformerEngine is absent, on CPU and CUDA alike.

Each is a name that the wheel sets only when TransformerEngine imports, or a default that only works with it.
"""

from __future__ import annotations

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils


def apply() -> None:
    """Set what the wheel forgot to set; does nothing when TransformerEngine is installed."""
    # moe_utils.router_gating_linear reads the name whatever was imported: NameError with --moe-router-dtype.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # multi_latent_attention believes in TransformerEngine although its classes are mocks: isinstance() TypeError.
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    # CheckpointWithoutOutput takes its default, False, for "fp8 is asked for" (it compares with None), and then wants
    # TransformerEngine's fp8 state: NameError with --recompute-modules layernorm or moe_act.
    if not hasattr(tensor_parallel_random, "FP8GlobalStateManager"):
        tensor_parallel_random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


apply()
