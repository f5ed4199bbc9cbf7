"""MIS by hand: weights, rejection, veto and normalization of short sequences."""

from __future__ import annotations

import math

import pytest
import torch

from examples.train_infer_mismatch_helper.formulas import (
    MisConfig,
    mismatch_importance_sampling,
)
from slime.utils.errors import ConfigError

LOG2, LOG4 = math.log(2.0), math.log(4.0)


def run(log_ratios, masks=None, **settings):
    """Weights, masks and metrics for log ratios per sample, with engine log-probs of -1."""
    rollout = [torch.full((len(row),), -1.0) for row in log_ratios]
    train = [torch.tensor(row) - 1.0 for row in log_ratios]
    masks = [torch.tensor(mask) for mask in masks or [[1] * len(row) for row in log_ratios]]
    weights, new_masks, metrics = mismatch_importance_sampling(train, rollout, masks, MisConfig(**settings))
    rows = None if weights is None else [row.tolist() for row in weights]
    return (
        rows,
        [row.tolist() for row in new_masks],
        {name: [row.tolist() for row in values] for name, values in metrics.items()},
    )


def test_one_catastrophic_token_vetoes_its_sequence_unless_it_is_not_trained():
    rows = [[0.0, -10.0], [0.0, -10.0]]
    settings = {"use_rs": True, "rs_lower_bound": 1e-9, "rs_upper_bound": 10.0, "rs_veto_threshold": 1e-4}
    _, masks, metrics = run(rows, masks=[[1, 1], [1, 0]], **settings)
    assert masks == [[0, 0], [1, 0]]
    assert metrics["rs_catastrophic_token_fraction"] == [[0.0, 1.0], [0.0, 0.0]]
    assert metrics["rs_catastrophic_seq_fraction"] == [[1.0, 1.0], [0.0, 0.0]]
    without = run(rows, **settings | {"use_rs": False})
    assert without[1] == [[1, 1], [1, 1]], "the veto is a part of rejection"


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
def test_what_stands_where_a_token_is_not_trained_does_not_matter(level, strange):
    settings = {
        "tis_level": level, "rs_level": level, "use_rs": True, "rs_veto_threshold": 1e-3, "tis_batch_normalize": True,
    }  # fmt: skip
    mask = [[1, 0, 1], [0]]
    plain = run([[LOG2, 0.0, -0.1], [0.0]], masks=mask, **settings)
    odd = run([[LOG2, strange, -0.1], [strange]], masks=mask, **settings)
    assert odd[1] == plain[1]
    for found, wanted in ((odd[0], plain[0]), *((odd[2][name], plain[2][name]) for name in plain[2])):
        assert found == [pytest.approx(row) for row in wanted]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tis_mode": "cut"}, "tis_mode is 'cut'; it must be one of truncate, clip, mask"),
        ({"rs_level": "group"}, "rs_level is 'group'; it must be one of token, sequence, geometric"),
        ({"tis_upper_bound": 0.0}, "tis_upper_bound is 0.0; it must be a number above 0"),
        ({"rs_veto_threshold": "1e-4"}, "rs_veto_threshold is '1e-4'.*in YAML 1.0e-4"),
        ({"tis_lower_bound": 3.0}, "tis_lower_bound is 3 and tis_upper_bound 2; they are swapped"),
    ],
)
def test_impossible_settings_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        MisConfig(**settings)
