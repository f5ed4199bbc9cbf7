"""Adding a model family touches one file: the example of CONTRIBUTING.md, on a copy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.contracts.source_tree import REPO
from tests.contracts.test_new_column import copy_by_links

pytestmark = pytest.mark.timeout(300)  # a start of Python with torch, transformers and Megatron, on a busy machine

FAMILY = '''\
"""Acme: Llama's layers; the output projection of attention is called ``dense``, and the MLP's width ``mlp_width``."""

from __future__ import annotations

from slime.backends.megatron_utils.models.rule import ModelFamily, Rule, WeightMap
from slime.backends.megatron_utils.models.shared_rules import ATTENTION, MLP, NORMS, TOP

ACME_ATTENTION = (*ATTENTION[:2], Rule("self_attention.linear_proj.weight", ("self_attn.dense.weight",)))

FAMILIES = (
    ModelFamily(
        model_types=("acme",),
        weight_map=WeightMap(family="Acme", top=TOP, layer=(*NORMS, *ACME_ATTENTION, *MLP)),
        sizes={"mlp_width": "ffn_hidden_size"},
    ),
)
'''
NEW_FILE = "slime/backends/megatron_utils/models/acme.py"

PROGRAM = """
import json, sys
from pathlib import Path

import slime
assert Path(slime.__path__[0]).parent == Path.cwd(), slime.__path__

import torch
from safetensors.torch import load_file, save_file
from slime.backends.megatron_utils.flags.hf_config_check import check_hf_config
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
from slime.backends.megatron_utils.model_provider import get_model_provider
from slime.backends.megatron_utils.parameters import iter_global_parameters
from slime.utils.errors import ConfigError
from tests.matrix.families.llama import flags
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process, write_hf_model

folder = Path("checkpoint")
write_hf_model(folder, "llama3")
config = json.loads((folder / "config.json").read_text())
model_flags = ["--hf-checkpoint", str(folder), *flags(folder)]
config.update(model_type="acme", architectures=["AcmeForCausalLM"], mlp_width=config.pop("intermediate_size"))
(folder / "config.json").write_text(json.dumps(config))
tensors = {
    name.replace("self_attn.o_proj", "self_attn.dense"): tensor
    for name, tensor in load_file(folder / "model.safetensors").items()
}
save_file(tensors, folder / "model.safetensors")

args = parse(*model_flags)
check_hf_config(args)
start_single_process(args)
model = get_model_provider(args)()
load_hf_weights(args, [model], folder)
exported = {}
for name, shard in iter_global_parameters([model]):
    exported.update(convert_to_hf(args, "AcmeForCausalLM", name, shard.tensor.detach().to(tensors["lm_head.weight"])))

(folder / "config.json").write_text(json.dumps({**config, "mlp_width": 57}))
try:
    refusal = check_hf_config(args)
except ConfigError as error:
    refusal = str(error)
print(json.dumps({
    "names": sorted(exported),
    "expected": sorted(tensors),
    "differ": [name for name in exported if not torch.equal(exported[name], tensors[name])],
    "refusal": refusal,
}))
"""


def test_a_family_of_its_own_touches_one_file(tmp_path):
    copy_by_links(REPO / "slime", tmp_path / "slime", {REPO / NEW_FILE})
    (tmp_path / NEW_FILE).write_text(FAMILY)
    for folder in ("tests", "slime_plugins"):
        (tmp_path / folder).symlink_to(REPO / folder)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert "model.layers.2.self_attn.dense.weight" in found["names"]
    assert found["names"] == found["expected"]
    assert found["differ"] == []
    assert "--ffn-hidden-size is 56; mlp_width is 57" in found["refusal"]
