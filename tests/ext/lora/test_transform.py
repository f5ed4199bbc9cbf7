"""Where the model under adapters comes from."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.ext.lora.transform import Lora
from slime.utils.errors import DataError

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
    with pytest.raises(DataError, match=f"{flag} is 'gone'"):
        Lora(Namespace(**{**FLAGS, **given})).load_frozen([])
