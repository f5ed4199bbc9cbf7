"""Buckets filled on a GPU, from parameters and from pinned host copies: the same bytes as by gathering."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.megatron_to_hf import hf_form
from slime.backends.megatron_utils.model import build_model
from slime.backends.megatron_utils.models import find_weight_map
from slime.backends.megatron_utils.policies import ModelSwitch
from slime.backends.megatron_utils.update_weight.gather import iter_hf_tensors
from slime.backends.megatron_utils.update_weight.transport import SentWeights
from slime.ext.fast_push.shard_buckets import ShardBuckets
from slime.utils.distributed_utils import init_gloo_group
from slime.weights.quantize import Quantizer
from slime.weights.quantize.formats import BlockFp8, is_quantized_offline
from tests.matrix import trainer
from tests.matrix.case import load_cases, read_config
from tests.matrix.shard_push import differences
from tests.unit.backends.megatron_utils.megatron_case import start_single_process

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("is_asleep", [False, True], ids=["awake", "asleep"])
@pytest.mark.parametrize("block", [None, (4, 4), (16, 8)], ids=["bf16", "fp8-4x4", "fp8-16x8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm5", "mimo"])
def test_buckets_hold_what_gathering_gives(
    tmp_path: Path, family: str, block: tuple[int, int] | None, is_asleep: bool
) -> None:
    case = load_cases([family])[family]
    case.write_checkpoint(tmp_path)
    args = trainer.make_args(case, tmp_path, "--bf16")
    start_single_process(args)
    init_gloo_group()
    model = build_model(args)
    load_hf_weights(args, model, tmp_path)
    host = None
    if is_asleep:
        switch = ModelSwitch(model)
        switch.backup("actor")
        host = switch.get("actor")
    name = read_config(tmp_path)["model_type"]
    whole = iter_hf_tensors(hf_form(args, name), model, dtype=torch.bfloat16)
    expected = {hf_name: tensor.clone() for hf_name, tensor in whole}
    quantizer = None
    if block is not None:
        plain = find_weight_map(name).plain
        quantized = [n for n, t in expected.items() if is_quantized_offline(n, t.shape, plain)]
        quantizer = Quantizer(BlockFp8(block), quantized)
        expected = {n: t for key, tensor in expected.items() for n, t in quantizer.quantize(key, tensor)}
    weights = SentWeights(
        form=hf_form(args, name),
        model=model,
        get_host_weights=lambda: host,
        dtype=torch.bfloat16,
        quantizer=quantizer,
        bucket_bytes=16384,
    )
    source = ShardBuckets(weights)
    if is_asleep:
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter.zero_()
    assert source.buffer().is_cuda
    assert differences(source, {n: tensor.cpu() for n, tensor in expected.items()}) == []
