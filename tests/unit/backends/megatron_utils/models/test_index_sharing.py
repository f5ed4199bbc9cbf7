"""Which layers choose keys, whose choice other layers use, and where the pipeline may be split."""

from __future__ import annotations

import pytest

from slime.utils.errors import ConfigError
from slime_plugins.models.glm5.index_sharing import IndexSharing, PipelineSplitError, index_sharing

GLM5_2 = {"index_topk_freq": 4, "index_skip_topk_offset": 3}


def computing(sharing: IndexSharing) -> list[int]:
    return [layer for layer in range(1, len(sharing.is_computing) + 1) if sharing.computes(layer)]


def test_glm5_2_chooses_in_layers_1_2_3_and_every_fourth_from_there() -> None:
    sharing = index_sharing(GLM5_2, 78)
    assert computing(sharing) == [1, 2, 3, *range(7, 76, 4)]
    assert [sharing.source(layer) for layer in (1, 2, 3, 4, 6, 7, 10, 11, 78)] == [1, 2, 3, 3, 3, 7, 7, 11, 75]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"index_topk_freq": 3},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FFSSFSFSS"},
        {"index_topk_pattern": ["full", "shared"] * 4 + ["full"]},
        {"indexer_types": ["full"] * 3 + ["shared"] * 6, "index_topk_freq": 2},
    ],
    ids=str,
)
def test_the_schedule_is_that_of_the_config_class_of_transformers(settings: dict) -> None:
    from transformers import GlmMoeDsaConfig

    expected = GlmMoeDsaConfig(num_hidden_layers=9, **settings).indexer_types
    assert list(index_sharing(settings, 9).is_computing) == [kind == "full" for kind in expected]


def test_a_stage_that_begins_with_a_skip_layer_is_refused_by_name() -> None:
    with pytest.raises(PipelineSplitError) as caught:
        index_sharing(GLM5_2, 78).check_stages([1, 11, 21])
    message = str(caught.value)
    assert "DSA index-share pipeline split is invalid" in message
    for part in ("starts at layer 21", "source layer 19", "index_topk_freq=4", "index_skip_topk_offset=3"):
        assert part in message
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, ConfigError)


def test_a_list_that_is_too_short_or_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 2 entries"):
        index_sharing({"indexer_types": ["full", "shared"]}, 3)
    with pytest.raises(ConfigError, match=r"among them \['X'\]"):
        index_sharing({"index_topk_pattern": "FXF"}, 3)
