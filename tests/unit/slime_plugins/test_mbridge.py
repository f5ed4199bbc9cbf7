"""The bridge at the import path of older recipes loads and exports like the trainer's loader."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.model_provider import get_model_provider
from slime.utils.errors import ConfigError
from slime_plugins.mbridge import DeepseekV32Bridge
from slime_plugins.mbridge.deepseek_v32 import DeepseekV32Bridge as ByModule
from tests.matrix.case import load_cases, read_tensors
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process


def test_weights_go_in_and_come_out_unchanged(tmp_path: Path) -> None:
    case = load_cases(["deepseek_v32"])["deepseek_v32"]
    case.write_checkpoint(tmp_path)
    args = parse("--hf-checkpoint", str(tmp_path), *case.flags(tmp_path))
    start_single_process(args)
    model = [get_model_provider(args)()]
    bridge = DeepseekV32Bridge(args)
    bridge.load_weights(model, tmp_path)
    exported, expected = dict(bridge.export_weights(model)), read_tensors(tmp_path)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


def test_another_model_is_refused(tmp_path: Path) -> None:
    assert ByModule is DeepseekV32Bridge
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ConfigError, match="model_type 'qwen3'; this bridge serves deepseek_v32 and glm_moe_dsa"):
        DeepseekV32Bridge(Namespace(hf_checkpoint=str(tmp_path)))
