"""The origin of the model under the adapters."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.checkpoint import load_checkpoint, save_checkpoint
from slime.backends.megatron_utils.parameters import iter_shards
from slime.backends.megatron_utils.policies import ModelSwitch, Policies
from slime.ext.lora.transform import Lora
from slime.flags.checkpoint import TRACKER
from slime.utils.errors import ConfigError, DataError
from tests.dist.trainer_case import write_model
from tests.unit.backends.megatron_utils.test_sleep import build_with
from tools import convert_torch_dist_to_hf

FLAGS = {
    **{"lora_rank": 4, "lora_alpha": None, "lora_target_modules": ["all-linear"], "lora_dropout": 0.0},
    **{"lora_experts": "each", "lora_push": "merged"},
    **{"load": "hf", "ref_load": None, "hf_checkpoint": "hf", "ckpt_step": None, "ref_ckpt_step": None},
}


@pytest.mark.parametrize(
    ("given", "flag", "problem"),
    [
        ({"ref_load": "gone"}, "--ref-load", ": gone is not a folder"),
        ({"load": "gone"}, "--load", ": gone is not a folder"),
        ({"load": None}, "--ref-load", " is not given"),
    ],
)
def test_a_model_under_adapters_that_is_not_there_is_named_by_the_flag_that_gave_it(
    given: dict[str, str | None], flag: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"{flag}{problem}"):
        Lora(Namespace(**{**FLAGS, **given})).load_frozen([])


def test_an_updated_reference_is_read_over_a_base_in_fewer_bits(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    flags = f"--bf16 --lora-rank 4 --lora-base-precision int4 --save {tmp_path / 'save'} --save-interval 1"
    args, model, *_ = build_with(tmp_path / "hf", f"{flags} --use-kl-loss --kl-loss-coef 0.1 --ref-update-interval 2")
    load_checkpoint(args, model)
    adapters = [shard.parameter for shard in iter_shards(model, added=True)]
    assert adapters

    def fill(value: float) -> None:
        for parameter in adapters:
            torch.nn.init.constant_(parameter, value)

    def is_filled(value: float) -> bool:
        return all(parameter.eq(value).all() for parameter in adapters)

    fill(2)
    save_checkpoint(args, 1, model, None, None)
    fill(3)
    switch = ModelSwitch(model)
    Policies(args, model, switch).load(with_ref=True, is_from_load=False, iteration=2)
    assert is_filled(3), "the actor is in the model afterwards"
    switch.switch_to("ref")
    assert is_filled(2)


def save_of_adapters(tmp_path: Path) -> tuple[Namespace, list[torch.nn.Module]]:
    """Save adapters of rank 4 as iteration 1 of ``run``, and return the arguments of a resume with the model."""
    write_model(tmp_path / "hf")
    run = tmp_path / "run"
    args, model, *_ = build_with(tmp_path / "hf", f"--lora-rank 4 --load {run} --save {run} --save-interval 1")
    load_checkpoint(args, model)
    save_checkpoint(args, 1, model, None, None)
    (run / TRACKER).write_text("1")
    args.load = str(run)
    return args, model


def test_saved_adapters_come_back_with_their_alpha_alone_and_warn_of_another_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args, model = save_of_adapters(tmp_path)
    args.lora_alpha = 8  # the default for rank 4
    load_checkpoint(args, model)
    assert "were trained on" not in caplog.text
    args.lora_alpha = 32
    with pytest.raises(
        DataError, match=r"--load .*iter_0000001: .* --lora-alpha 8, and this run has 32.* give --lora-a"
    ):
        load_checkpoint(args, model)
    args.lora_alpha = None
    (tmp_path / "hf").rename(tmp_path / "other")
    args.hf_checkpoint = str(tmp_path / "other")
    args.ref_load = None
    load_checkpoint(args, model)
    assert f"were trained on {tmp_path / 'hf'}, and are added to {tmp_path / 'other'} now" in caplog.text


def test_the_converter_without_a_model_sends_adapters_to_the_tool_that_merges_them(tmp_path: Path) -> None:
    save_of_adapters(tmp_path)
    argv = ["--input-dir", tmp_path / "run/iter_0000001", "--output-dir", tmp_path / "out"]
    options = convert_torch_dist_to_hf.parse([*map(str, argv), "--origin-hf-dir", str(tmp_path / "hf")])
    with pytest.raises(ConfigError, match="holds the adapters of a run with --lora-rank.* tools/convert_to_hf.py"):
        convert_torch_dist_to_hf.convert(options)
    assert not (tmp_path / "out").exists()
