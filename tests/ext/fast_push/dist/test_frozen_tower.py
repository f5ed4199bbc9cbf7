"""A frozen vision tower, pushed into SGLang's own model: sent only to engines that lack it."""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.model import build_model
from slime.compose import parts
from slime.ray.parts import load_all
from slime.backends.megatron_utils.update_weight.updater import WeightUpdater
from slime.ext.fast_push.verified_push import VerifiedPush
from slime.utils.distributed_utils import init_gloo_group
from tests.matrix import layout_rank
from tests.matrix.case import load_cases, read_config, read_tensors, write_bf16_copy
from tests.matrix.layouts import _case, write_checkpoint
from tests.matrix.pool import RankPool
from tests.push_matrix.engines import Client, serve_engines

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

FAMILY = "qwen3_vl"
LAYOUTS = {
    "colocated, TP2": (("--tensor-model-parallel-size", 2, "--sequence-parallel"), True),
    "distributed, PP2": (("--pipeline-model-parallel-size", 2), False),
}
STEPS = ("first", "trained", "restarted", "trained again", "other weights", "checked", "after the check", "on disk")


def push_steps(
    name: str, config: dict[str, object], folder: str, flags: Any, is_colocated: bool, addresses: list[str], disk: str
) -> dict[str, tuple[int, list[str]]]:
    """Bytes of each push, and the engines' weights afterwards."""
    logging.disable(logging.WARNING)
    init_gloo_group()
    args = layout_rank.start(_case(name, config), Path(folder), (*flags, "--bf16"))
    disk_flags = {
        **{"update_weight_disk_dir": disk, "update_weight_local_checkpoint_dir": None},
        **{"update_weight_disk_keep_files": False, "update_weight_start_version": 0},
        **{"update_weight_delta_encoding": "xor", "update_weight_delta_checksum": "xxh3-128"},
        "custom_update_weight_post_write_path": None,
    }
    args = Namespace(**{
        **vars(args), **disk_flags, "train_vision_tower": False, "update_weight_buffer_size": 16 * 1024,
        "weight_update_timeout_s": 60.0, "colocate": is_colocated, "update_weight_mode": "full",
        "update_weight_transport": "nccl", "check_weight_update_equal": False,
    })  # fmt: skip
    model = build_model(args, transforms=load_all(parts(args).transforms))
    load_hf_weights(args, model, folder)
    first = 0 if is_colocated else dist.get_world_size()
    # The engine on two GPUs, and in the distributed job another on one.
    engines = [
        Client(address, index=index, num_gpus=2 - index, gpu_offset=first + 2 * index, is_colocated=is_colocated)
        for index, address in enumerate(addresses)
    ]
    told: dict[str, tuple[int, list[str]]] = {}
    updater = WeightUpdater(
        args, model, lambda: None, hf_config=read_config(Path(folder)), make_transport=VerifiedPush.of
    )

    def on_engine(index: int, verb: str, *arguments: Any) -> None:
        if dist.get_rank() == 0:
            engines[index].now(verb, *arguments)
        dist.barrier()

    def push(step: str) -> None:
        report = updater.push()
        assert not report.excluded and report.num_engines == len(engines), report
        if dist.get_rank() == 0:
            told[step] = report.num_bytes, [engine.now("digest") for engine in engines]
        dist.barrier()

    for index in range(len(engines)):
        on_engine(index, "become", folder, "bfloat16", disk_flags)
    updater.connect(engines, len(engines))
    for step in STEPS:
        if step == "restarted":
            on_engine(0, "become", folder, "bfloat16", disk_flags)
        elif step == "other weights":
            on_engine(0, "load_stock", f"{folder}-other")
        elif step == "on disk":
            updater.close()
            args.update_weight_transport = "disk"
            config = read_config(Path(folder))
            updater = WeightUpdater(
                args, model, lambda: None, hf_config=config, first_version=99, make_transport=VerifiedPush.of
            )
            updater.connect(engines, len(engines))
        elif step != "first":
            with torch.no_grad():
                for parameter in (p for chunk in model for p in chunk.parameters() if p.requires_grad):
                    parameter.mul_(0.5)
        args.check_weight_update_equal = step == "checked"
        push(step)
    updater.close()
    return told


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_frozen_tower_is_sent_to_engines_that_lack_it_and_to_no_others(tmp_path: Path, layout: str) -> None:
    flags, is_colocated = LAYOUTS[layout]
    case = load_cases([FAMILY])[FAMILY]
    case = replace(case, config={**case.config, "num_hidden_layers": 4})
    with serve_engines([1, 2]) as addresses, RankPool() as pool:
        plain, folder = tmp_path / "plain", tmp_path / "model"
        pool.run(write_checkpoint, 1, case.name, dict(case.config), str(plain))
        write_bf16_copy(plain, folder)
        case.write_checkpoint(tmp_path / "plain-other", seed=7)
        write_bf16_copy(tmp_path / "plain-other", tmp_path / "model-other")
        where = addresses[2] + ([] if is_colocated else addresses[1])
        told = pool.run(
            push_steps,
            2,
            *(case.name, dict(case.config), str(folder), flags, is_colocated, where, str(tmp_path / "versions")),
            timeout_s=300,
        )[0]
    tower = sum(2 * t.numel() for name, t in read_tensors(folder).items() if name.startswith("model.visual."))
    sizes = {step: size for step, (size, _) in told.items()}
    whole, part = sizes["first"], sizes["trained"]
    assert tower <= whole - part < 1.5 * tower, "slices begin at multiples of 256 bytes"
    assert sizes["restarted"] == sizes["other weights"] == sizes["checked"] == whole
    assert abs(sizes["on disk"] - whole) < 0.1 * tower, "the folder of a version is a whole model"
    assert sizes["trained again"] == sizes["after the check"] == part
    held = {step: digests for step, (_, digests) in told.items()}
    assert held["trained"] != held["first"]
    for step, before in (("restarted", "trained"), ("other weights", "trained again"), ("on disk", "after the check")):
        assert held[step] == held[before], f"{step}: nothing was trained since, so engines hold what they held"
