"""A model family with special layers is one new folder: CONTRIBUTING.md's example, applied to a copy."""

from __future__ import annotations

import pytest

from tests.contracts.copied_tree import copy_by_links, printed_by
from tests.contracts.source_tree import REPO

pytestmark = pytest.mark.timeout(300)  # starts a Python with torch, transformers and Megatron on a busy machine

FAMILY = '''\
"""Acme: Llama's layers, with a shift behind the norm in front of attention; the MLP's width is ``mlp_width``."""

from __future__ import annotations

from slime.backends.megatron_utils.models.family import ModelFamily
from slime.backends.megatron_utils.models.rule import Rule, WeightMap
from slime_plugins.models.shared_weights import ATTENTION, MLP, NORMS, TOP

SHIFT = Rule("input_layernorm.shift", ("input_layernorm.shift",))

FAMILIES = (
    ModelFamily(
        model_types=("acme",),
        weight_map=WeightMap(family="Acme", top=TOP, layer=(*NORMS, SHIFT, *ATTENTION, *MLP)),
        spec="slime_plugins.models.acme.layers get_acme_spec",
        dims=lambda dims, config: {"own_parameters": dims.hidden_size},
        sizes={"mlp_width": "ffn_hidden_size"},
        engine_hides_experts=True,
        published={"Acme-8B": {"model_type": "acme"}},
    ),
)
'''
LAYERS = '''\
"""The layers of Acme."""

from __future__ import annotations

from dataclasses import replace

import torch

from slime.backends.megatron_utils.layers.layer_specs import get_block_spec
from slime.backends.megatron_utils.layers.norm import Norm


class ShiftedNorm(Norm):
    def __init__(self, config, hidden_size, eps=1e-5, **options):
        super().__init__(config, hidden_size, eps)
        self.shift = torch.nn.Parameter(torch.zeros_like(self.weight))
        self.shift.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return super().forward(x) + self.shift


def get_acme_spec(args, config, vp_stage=None):
    block = get_block_spec(config, vp_stage)
    block.layer_specs = [
        replace(layer, submodules=replace(layer.submodules, input_layernorm=ShiftedNorm))
        for layer in block.layer_specs
    ]
    return block
'''
FOLDER = "slime_plugins/models/acme"

PROGRAM = """
import json, sys
from pathlib import Path

import slime
assert Path(slime.__path__[0]).parent == Path.cwd(), slime.__path__

import torch
from safetensors.torch import load_file, save_file
from slime.flags.family_checks import draft_problems, replay_problems
from slime.backends.megatron_utils.flags.hf_config_check import check_hf_config
from slime.backends.megatron_utils.flags.model_dims import model_dims
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
from slime.backends.megatron_utils.model_provider import get_model_provider
from slime.backends.megatron_utils.models import published_config
from slime.backends.megatron_utils.parameters import iter_global_parameters
from slime.ext.plan.make_plan import _notes
from slime.ext.plan.parameters import model_size
from slime.ext.plan.plan import PlanOptions, find_card
from slime.utils.errors import ConfigError
from tests.matrix.flags import model_flags as flags
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process, write_hf_model

folder = Path("checkpoint")
write_hf_model(folder, "llama3")
config = json.loads((folder / "config.json").read_text())
model_flags = ["--hf-checkpoint", str(folder), *flags(folder)]
config.update(model_type="acme", architectures=["AcmeForCausalLM"], mlp_width=config.pop("intermediate_size"))
(folder / "config.json").write_text(json.dumps(config))
tensors = load_file(folder / "model.safetensors")
for layer in range(3):
    tensors[f"model.layers.{layer}.input_layernorm.shift"] = torch.randn(32)
save_file(tensors, folder / "model.safetensors")

def refusal(*flags):
    try:
        check_hf_config(parse(*flags))
    except ConfigError as error:
        return str(error)

spec = "slime_plugins.models.acme.layers get_acme_spec"
found_spec = parse(*model_flags).spec
model_flags += ["--spec", *spec.split()]
args = parse(*model_flags)
start_single_process(args)
model = get_model_provider(args)()
load_hf_weights(args, [model], folder)
exported = {}
for name, shard in iter_global_parameters([model]):
    exported.update(convert_to_hf(args, "AcmeForCausalLM", name, shard.tensor.detach().to(tensors["lm_head.weight"])))

(folder / "config.json").write_text(json.dumps({**config, "mlp_width": 57}))
print(json.dumps({
    "names": sorted(exported),
    "expected": sorted(tensors),
    "differ": [name for name in exported if not torch.equal(exported[name], tensors[name])],
    "found_spec": found_spec,
    "another_width": refusal(*model_flags),
    "parameters": sum(parameter.numel() for parameter in model.parameters()),
    "planned": model_size(model_dims(args)),
    "notes": list(_notes(args, PlanOptions(card=find_card("H100"), lengths=(8,)))),
    "published": published_config("/models/Acme-8B"),
    "engines": [*draft_problems("EAGLE", None, config), *replay_problems(config)],
}))
"""


def test_a_family_with_layers_of_its_own_is_one_folder(tmp_path):
    copy_by_links(REPO / "slime_plugins", tmp_path / "slime_plugins", {REPO / FOLDER})
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "family.py").write_text(FAMILY)
    (tmp_path / FOLDER / "layers.py").write_text(LAYERS)
    for folder in ("tests", "slime"):
        (tmp_path / folder).symlink_to(REPO / folder)
    found = printed_by(PROGRAM, tmp_path)
    assert "model.layers.2.input_layernorm.shift" in found["names"]
    assert found["names"] == found["expected"]
    assert found["differ"] == []
    assert found["found_spec"] == ["slime_plugins.models.acme.layers", "get_acme_spec"]
    assert "--ffn-hidden-size is 56; mlp_width is 57" in found["another_width"]
    assert found["planned"] == found["parameters"]
    assert found["notes"] == []
    assert found["published"] == {"model_type": "acme"}
    assert [message.split(":")[0].split()[0] for message in found["engines"]] == [
        "--sglang-speculative-algorithm",
        "--use-rollout-routing-replay",
    ]
