"""The MIS example: settings, metric names, and equal results under any context parallelism."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import yaml

from examples.train_infer_mismatch_helper.mis import (
    KEYS,
    config_from_args,
)
from slime.utils.errors import ConfigError
from tests.contracts.source_tree import REPO
from tests.unit.backends.megatron_utils.megatron_case import parse, start_single_process
from tests.unit.backends.megatron_utils.test_loss import MODEL_FLAGS, make_args, make_batch, make_logits, run

PATH = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
YAML = yaml.safe_load((REPO / "examples/train_infer_mismatch_helper/mis.yaml").read_text())


def test_the_yaml_file_names_every_setting():
    assert set(YAML) == set(KEYS)
    config = config_from_args(Namespace(**YAML))
    assert (config.tis_bounds, config.rs_bounds) == ((0.5, 2.0), (0.99, 1.01))


def test_a_misspelt_setting_is_refused_and_those_of_vanilla_tis_are_not():
    with pytest.raises(ConfigError, match="tis_levle .*Did you mean tis_level"):
        config_from_args(Namespace(tis_levle="token"))
    assert config_from_args(Namespace(tis_clip=2.0, tis_clip_low=0.0, use_tis=True, rs_lower_bound=None)).use_tis


def mis_run(**settings: Any) -> tuple[float, dict[str, float]]:
    """Two samples of one and two tokens, with weights e^0.5, 1 and e^-3, and advantages 1."""
    start_single_process(parse(*MODEL_FLAGS))
    batch = make_batch(
        masks=((1,), (1, 1)),
        advantages=[[1.0], [1.0, 1.0]],
        log_probs=[[-1.0], [-1.0, -4.0]],
        rollout_log_probs=[[-1.5], [-1.0, -1.0]],
    )
    args = make_args(custom_tis_function_path=PATH, **settings)
    return run(args, batch, make_logits(batch, [[-1.0], [-1.0, -4.0]]))


def test_weights_multiply_the_loss_and_rejection_leaves_denominators_alone():
    value, metrics = mis_run(use_tis=True, tis_upper_bound=10.0)
    weights = [1.64872, 1.0, 0.049787]
    assert value == pytest.approx(-(weights[0] + (weights[1] + weights[2]) / 2), rel=1e-4)
    assert metrics["mis_tis_weight_before_bound"] == metrics["ois"] == pytest.approx(-value, rel=1e-4)
    value, metrics = mis_run(use_rs=True, rs_lower_bound=0.5, rs_upper_bound=2.0)
    assert value == pytest.approx(-(1 + 1 / 2), rel=1e-4), "no weights; of the second sample one token of two is left"
    assert metrics["mis_rs_mask_fraction_low"] == pytest.approx(0.5), "over the tokens that came in"
    assert metrics["entropy_loss"] > 0
    value, metrics = mis_run(use_rs=True, rs_level="sequence", rs_lower_bound=0.5, rs_upper_bound=2.0)
    assert value == pytest.approx(-1.0, rel=1e-4)
