"""The engines' compute dtype: this job's, and with a group's override."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron_utils.models import dtype_of_fp32
from slime.backends.sglang_utils.sglang_config import ServerGroupConfig, own_dtype, served_dtype, trainer_dtype
from slime.ray.engines import models

PRECISIONS = {"bf16": False, "fp16": False, "fp32": False}


@pytest.mark.parametrize(
    ("precision", "asked", "dtype"),
    [
        ("fp32", None, "float32"),
        ("fp32", "auto", "float32"),
        ("bf16", "auto", "bfloat16"),
        ("fp16", None, "float16"),
        ("fp32", "bfloat16", "bfloat16"),
    ],
)
def test_an_engine_of_the_job_has_the_trainers_dtype_unless_a_flag_says_otherwise(
    precision: str, asked: str | None, dtype: str
) -> None:
    assert own_dtype(asked, trainer_dtype(Namespace(**{**PRECISIONS, precision: True}))) == dtype


@pytest.mark.parametrize(
    ("config", "asked", "dtype"),
    [
        ({"dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"torch_dtype": "float16"}, "auto", "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "auto", "bfloat16"),
        ({"dtype": "float32", "model_type": "qwen3"}, "auto", "float16"),
        ({"dtype": "float32", "model_type": "gemma3_text"}, "auto", "bfloat16"),
        ({}, "auto", "float16"),
        ({"dtype": "bfloat16"}, "float32", "float32"),
    ],
)
def test_auto_is_what_sglang_makes_of_it(tmp_path: Path, config: dict[str, Any], asked: str, dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert served_dtype(asked, str(tmp_path), of_fp32=dtype_of_fp32) == dtype
    assert served_dtype("auto", str(tmp_path / "nowhere"), of_fp32=dtype_of_fp32) == ""


def test_a_groups_override_wins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    for overrides, expected in (({}, "float32"), ({"dtype": "half"}, "half"), ({"dtype": "auto"}, "bfloat16")):
        group = ServerGroupConfig(
            worker_type="regular", num_gpus=1, num_gpus_per_engine=1, overrides=overrides, of_flags={"dtype": "auto"}
        )
        assert models._dtype_of(group, str(tmp_path), "float32") == expected
