"""Buckets that ranks fill from their own shards: the same bytes as gathered tensors, and no work per tensor.

`python -m tests.matrix.shard_push` compares every family in every layout.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.model import build_model
from slime.backends.megatron_utils.policies import ModelSwitch
from slime.backends.megatron_utils.sleep import OffloadedState
from slime.backends.megatron_utils.megatron_to_hf import hf_form
from slime.backends.megatron_utils.update_weight.transport import SentWeights
from slime.backends.megatron_utils.update_weight.gather import iter_hf_tensors
from slime.ext.fast_push.kernels.tables import CastTable
from slime.ext.fast_push.shard_buckets import ShardBuckets
from slime.utils.distributed_utils import init_gloo_group
from slime.utils.errors import ConfigError, WeightSyncError
from slime.weights.quantize import Quantizer
from slime.weights.quantize.formats import BlockFp8
from tests.matrix import layout_rank
from tests.matrix.case import load_cases, read_config
from tests.matrix.layouts import LAYOUTS, write_checkpoint
from tests.matrix.pool import RankPool
from tests.matrix.report import summary
from tests.matrix.shard_push import FAST_FORMATS, differences, run_cells

pytestmark = pytest.mark.dist

FAST_CELLS = {
    "qwen3_moe": ("TP2 SP", "PP2 VPP2", "TP2 EP2 SP"),
    "deepseek_v3": ("PP2 uneven", "TP2 ETP2 SP"),
    "glm4_moe": ("EP2",),
    "minimax_m2": ("TP2 EP2 SP",),
    "glm5": ("TP2 SP",),
    "glm4": ("TP2 SP",),
    "mimo-tied": ("PP2 uneven", "TP2 SP"),
    "llama": ("CP2",),
}


@pytest.mark.parametrize("family", FAST_CELLS)
def test_the_ranks_buckets_hold_what_gathering_gives(family: str) -> None:
    cells = run_cells(list(load_cases([family]).values())[:1], FAST_CELLS[family], FAST_FORMATS)
    assert [cell.column for cell in cells] == sorted(FAST_CELLS[family], key=list(LAYOUTS).index)
    assert all(cell.passed for cell in cells), summary(cells)


class MissesATensor(Quantizer):
    """A source with which the second rank cannot work."""

    def is_quantized(self, name: str) -> bool:
        if torch.distributed.get_rank() == 1:
            raise ConfigError(f"the quantized --hf-checkpoint has no tensor {name}")
        return False


def push_again_and_again(name: str, folder: str) -> dict[str, Any]:
    """Push one source repeatedly while the parameters change, move, and sleep."""
    init_gloo_group()
    case = load_cases([name])[name]
    args = layout_rank.start(case, Path(folder), LAYOUTS["TP2 EP2 SP"].flags)
    model = build_model(args)
    load_hf_weights(args, model, folder)
    model_name = read_config(Path(folder))["model_type"]
    host: dict[str, Any] = {"weights": None}
    tables: list[int] = []
    launches: list[int] = []
    original_init, original_run = CastTable.__init__, CastTable.run

    def counting_init(self: CastTable, *arguments: Any, **keywords: Any) -> None:
        original_init(self, *arguments, **keywords)
        tables.append(len(self.items))

    def counting_run(self: CastTable, out: torch.Tensor) -> None:
        launches.append(len(self.items))
        original_run(self, out)

    CastTable.__init__, CastTable.run = counting_init, counting_run  # type: ignore[method-assign]
    weights = SentWeights(
        form=hf_form(args, model_name),
        model=model,
        get_host_weights=lambda: host["weights"],
        dtype=torch.float32,
        bucket_bytes=16 * 1024,
    )
    source = ShardBuckets(weights)
    result: dict[str, Any] = {"problems": {}, "tables": {}, "launches": {}, "addresses": []}

    def push(label: str) -> None:
        whole = iter_hf_tensors(hf_form(args, model_name), model, dtype=torch.float32, host_weights=host["weights"])
        expected = {hf_name: tensor.clone() for hf_name, tensor in whole}
        tables.clear()
        launches.clear()
        result["problems"][label] = differences(source, expected)
        result["tables"][label], result["launches"][label] = len(tables), len(launches)
        result["addresses"].append(source.buffer().data_ptr())

    with torch.no_grad():
        push("first")
        for parameter in model[0].parameters():
            parameter.mul_(1.5)
        push("trained")
        moved = next(iter(model[0].parameters()))
        moved.data = moved.data.clone().add_(1)
        push("moved")
        switch = ModelSwitch(model)
        switch.backup("actor")
        host["weights"] = switch.get("actor")
        offloaded = OffloadedState(model, None, chunk_bytes=4096)
        offloaded.offload(switch.current_copies())
        push("asleep")
        push("asleep again")
        whole = iter_hf_tensors(hf_form(args, model_name), model, dtype=torch.float32, host_weights=host["weights"])
        result["problems"]["made asleep"] = differences(ShardBuckets(weights), dict(whole))
        offloaded.onload()
        host["weights"] = None
        push("awake")
    quantizer = MissesATensor(BlockFp8((4, 4)), [])
    with pytest.raises(WeightSyncError) as refused:
        ShardBuckets(replace(weights, quantizer=quantizer))
    result["refusal"] = str(refused.value)
    result["buckets"] = len(source.plan.buckets[torch.distributed.get_rank()])
    result["tensors"] = len(source.manifest.tensors)
    return result


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    with RankPool() as pool, tempfile.TemporaryDirectory() as root:
        case = load_cases(["qwen3_moe"])["qwen3_moe"]
        pool.run(write_checkpoint, 1, case.name, case.config, f"{root}/hf")
        return pool.run(push_again_and_again, 2, case.name, f"{root}/hf")


def test_a_push_sends_the_weights_of_now_wherever_they_lie(ranks: list[dict[str, Any]]) -> None:
    problems = ranks[0]["problems"]
    assert list(problems) == ["first", "trained", "moved", "asleep", "asleep again", "made asleep", "awake"]
    assert not any(problems.values()), problems


def test_a_push_is_one_launch_for_each_bucket_and_none_for_a_tensor(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert set(rank["launches"].values()) == {rank["buckets"]}
        assert rank["buckets"] < rank["tensors"] / 4


def test_tables_are_made_again_only_when_parameters_lie_elsewhere(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        remade = {label: count for label, count in rank["tables"].items() if count}
        assert remade == dict.fromkeys(("first", "moved", "asleep", "awake"), rank["buckets"])


def test_the_buffer_stays_at_its_address(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(set(rank["addresses"])) == 1


def test_what_one_rank_cannot_send_is_an_error_on_all(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["refusal"] == ranks[1]["refusal"]
    assert "trainer rank 1 cannot plan its buckets" in ranks[0]["refusal"]
    assert "has no tensor model.embed_tokens.weight" in ranks[0]["refusal"]
