"""Which settings of small Adams are refused, and which part of a job they require."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime import compose
from slime.backends.megatron_utils.arguments import check_taken_up
from slime.ext.small_adam.flags import GROUP
from slime.flags.parse import GROUPS, slime_validate_args
from slime.flags.parser import Parser
from slime.utils.errors import ConfigError
from tests.unit.backends.megatron_utils.megatron_case import parse
from tests.unit.flags.conftest import command, model_folder, prompt_file

__all__ = ["command", "model_folder", "prompt_file"]
DENSE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --swiglu".split()
PRECISION_AWARE = "--bf16 --use-precision-aware-optimizer"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--save", "x"], "add --no-save-optim"),
        (["--reset-optimizer-states"], "the first is about moments, and the second has none"),
        (["--no-save-optim"], None),
    ],
)
def test_a_stateless_adam_beside_a_flag_about_moments_is_refused(
    command: list[str],  # noqa: F811
    words: list[str],
    says: str | None,
) -> None:
    parser = Parser((*GROUPS, GROUP))
    megatron = {"bf16": False, "fp16": False, "ckpt_step": None, "finetune": False}
    namespace = Namespace(**megatron, no_load_optim=False, no_load_rng=False)
    args = parser.parse_args([*command, "--use-stateless-adam", *words], namespace=namespace)
    if says is None:
        slime_validate_args(args, parser)
    else:
        with pytest.raises(ConfigError, match=says):
            slime_validate_args(args, parser)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("", []),
        ("--use-stateless-adam", ["Stateless"]),
        (PRECISION_AWARE, []),
        (f"{PRECISION_AWARE} --optimizer-cpu-offload", []),
        (f"{PRECISION_AWARE} --exp-avg-dtype bf16", ["NarrowMoments"]),
    ],
)
def test_only_an_adam_that_differs_from_torch_s_is_a_part_of_the_job(words: str, names: list[str]) -> None:
    args = parse(*DENSE, *words.split())
    assert [part.path.rpartition(":")[2] for part in compose.chosen(args, compose.TRANSFORMS)] == names


def test_narrow_moments_and_fp8_without_their_extensions_are_refused() -> None:
    for words, fact, says in (
        (f"{PRECISION_AWARE} --exp-avg-dtype bf16", "narrow_moments", "--exp-avg-dtype is torch.bfloat16"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "trains_in_fp8", "--fp8-format is e4m3"),
    ):
        args = parse(*DENSE, *words.split())
        check_taken_up(args)
        delattr(args, fact)
        with pytest.raises(ConfigError, match=says):
            check_taken_up(args)
