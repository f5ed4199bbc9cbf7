"""Where the model under adapters comes from."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.checkpoint import load_checkpoint, save_checkpoint
from slime.backends.megatron_utils.parameters import iter_shards
from slime.backends.megatron_utils.policies import ModelSwitch, Policies
from slime.ext.lora.transform import Lora
from slime.utils.errors import ConfigError
from tests.dist.trainer_case import write_model
from tests.unit.backends.megatron_utils.test_sleep import build_with

FLAGS = {
    **{"lora_rank": 4, "lora_alpha": None, "lora_target_modules": ["all-linear"], "lora_dropout": 0.0},
    **{"lora_experts": "each", "lora_push": "merged"},
    **{"load": "hf", "ref_load": None, "hf_checkpoint": "hf", "ckpt_step": None, "ref_ckpt_step": None},
}


@pytest.mark.parametrize(
    ("given", "flag"),
    [({"ref_load": "gone"}, "--ref-load"), ({"load": "gone"}, "--load")],
)
def test_a_model_under_adapters_that_is_not_there_is_named_by_the_flag_that_gave_it(
    given: dict[str, str], flag: str
) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: gone is not a folder"):
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
