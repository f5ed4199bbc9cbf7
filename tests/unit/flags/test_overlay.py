"""--custom-config-path: over the flags, before anything is derived."""

from __future__ import annotations

import pytest

from slime.flags.parse import slime_validate_args
from slime.utils.errors import ConfigError


@pytest.fixture
def overlay(tmp_path):
    def write(text: str) -> list[str]:
        (tmp_path / "overlay.yaml").write_text(text)
        return ["--custom-config-path", str(tmp_path / "overlay.yaml")]

    return write


def test_derived_values_see_the_overlay(make_args, overlay):
    args = make_args(*overlay("num_steps_per_rollout: 4\neps-clip: 0.1\n"))
    slime_validate_args(args)
    assert (args.global_batch_size, args.eps_clip_high) == (2, 0.1)


def test_other_keys_are_settings_of_plug_ins(make_args, overlay):
    args = make_args(*overlay("tis_mode: truncate\nmax_turns: 3\nnested: {a: [1]}\n"))
    slime_validate_args(args)
    assert (args.tis_mode, args.max_turns, args.nested) == ("truncate", 3, {"a": [1]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "holds a list; a mapping of keys to values is needed"),
        ("custom_config_path: x\n", "overlays do not nest"),
        ("weight_push_failure: refill\n", "--weight-push-failure refill has no effect without --use-fault-tolerance"),
    ],
)
def test_a_wrong_overlay_is_refused(make_args, overlay, text, says):
    with pytest.raises(ConfigError) as caught:
        slime_validate_args(make_args(*overlay(text)))
    assert says in str(caught.value)
