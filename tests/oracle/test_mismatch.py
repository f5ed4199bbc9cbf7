"""MIS against its plain reference on random ragged batches: every level, mode, rejection, veto and normalization."""

import itertools

import pytest
import torch

from examples.train_infer_mismatch_helper.formulas import MisConfig, mismatch_importance_sampling
from tests.oracle.batches import random_examples
from tests.oracle.mismatch import multiple_importance_sampling
from tests.oracle.variants import MIS_SETTINGS

LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "clip", "mask")
REJECTIONS = (
    {"use_rs": False},
    {"use_rs": True},
    {"use_rs": True, "rs_level": "sequence", "rs_lower_bound": 0.2, "rs_upper_bound": 3.0},
    {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.1},
    {"use_rs": True, "rs_lower_bound": 0.01, "rs_upper_bound": 100.0, "rs_veto_threshold": 0.45},
)
CASES = [
    {"tis_level": level, "tis_mode": mode, "tis_batch_normalize": normalised, **rejection}
    for level, mode, normalised, rejection in itertools.product(LEVELS, MODES, (False, True), REJECTIONS)
] + [{"use_tis": False, **rejection} for rejection in REJECTIONS]


@pytest.mark.parametrize("seed", range(3))
def test_weights_masks_and_metrics(seed):
    examples = random_examples(seed)
    columns = [[torch.tensor(getattr(example, field)) for example in examples] for field in ("old", "rollout", "mask")]
    for changes in CASES:
        settings = {**MIS_SETTINGS, **changes}
        found = mismatch_importance_sampling(*columns, MisConfig(**settings))
        wanted = multiple_importance_sampling(examples, settings)
        assert [row.tolist() for row in found.mask_N] == [verdict.keeps for verdict in wanted], changes
        if settings["use_tis"]:
            assert_close(found.weight_N, [verdict.weights for verdict in wanted], examples, changes)
        else:
            assert found.weight_N is None
        assert found.metrics.keys() == wanted[0].metrics.keys(), changes
        for name, rows in found.metrics.items():
            assert_close(rows, [verdict.metrics[name] for verdict in wanted], examples, (name, changes))


def assert_close(found, wanted, examples, what):
    """Compares only trained tokens; other values do not matter."""
    for row, numbers, example in zip(found, wanted, examples, strict=True):
        trains = torch.tensor(example.mask) != 0
        torch.testing.assert_close(
            row.double()[trains],
            torch.tensor(numbers, dtype=torch.float64)[trains],
            rtol=1e-5,
            atol=1e-5,
            msg=lambda text: f"{what}: {text}",
        )
