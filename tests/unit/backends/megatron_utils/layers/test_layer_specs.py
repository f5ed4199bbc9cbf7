"""Layers with a norm on both sides; the matrix (family glm4) checks that they compute what GLM-4 does."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.layers.layer_specs import SandwichLayer
from slime.backends.megatron_utils.model_provider import get_model_provider
from tests.matrix import trainer
from tests.matrix.case import load_cases
from tests.matrix.parity import one_process_world
from tests.unit.backends.megatron_utils.megatron_case import pack

BOTH = {"post_self_attn_layernorm", "post_mlp_layernorm"}


@pytest.fixture
def build(tmp_path):
    """Build untrained models of GLM-4's family with the given norms."""
    case = load_cases(["glm4-32b"])["glm4-32b"]
    case.write_checkpoint(tmp_path)

    def build(norms):
        args = trainer.make_args(case, tmp_path)
        vars(args).update({name: name in norms for name in BOTH})
        initialize.init(args)
        return get_model_provider(args)()

    with one_process_world():
        yield build


@pytest.mark.parametrize("norms", [BOTH, {"post_mlp_layernorm"}, set()], ids=["both norms", "one norm", "none"])
def test_the_flags_say_which_norms_there_are_in_memory_and_on_disk(build, norms):
    model = build(norms)
    names = {name.split(".")[3] for name, _ in model.named_parameters() if ".layers." in name}
    assert {name for name in names if name.startswith("post_")} == norms
    assert isinstance(model.decoder.layers[0], SandwichLayer) == bool(norms)
    keys = {value.key.removeprefix("decoder.layers.") for value in model.sharded_state_dict().values()}
    assert {key for key in keys if key.startswith("post_")} == {f"{name}.weight" for name in norms}


def test_a_pass_without_gradients_keeps_no_graph(build):
    layer = build(BOTH).decoder.layers[0]
    with torch.no_grad():
        output, _ = layer(torch.ones(4, 1, 48), packed_seq_params=pack([torch.arange(4)])[1])
    assert not output.requires_grad
