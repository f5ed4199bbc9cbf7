"""--megatron-config-path: overrides by role."""

from __future__ import annotations

import pytest

from slime.flags.overlay import load_role_overrides
from slime.flags.parse import slime_validate_args
from slime.utils.errors import ConfigError


@pytest.fixture
def roles(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "roles.yaml").write_text(text)
        return str(tmp_path / "roles.yaml")

    return write


def test_the_actors_overrides_are_resolved_like_flags(make_args, roles):
    path = roles(
        "megatron:\n  - {name: a, role: actor, overrides: {lr: 1e-5, eps-clip: '0.1', num_gpus_per_node: 4}}\n"
    )
    args = make_args("--megatron-config-path", path)
    slime_validate_args(args)
    assert (args.lr, args.eps_clip, args.eps_clip_high, args.num_gpus_per_node) == (1e-5, 0.1, 0.1, 8)


def test_args_is_another_name_of_overrides(roles):
    path = roles("megatron:\n  - {name: a, role: actor, args: {lr: 2}}\n  - {name: c, role: critic}\n")
    assert load_role_overrides(path) == {"actor": {"lr": 2}, "critic": {}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("actor: {}\n", "needs a list under the key megatron"),
        ("megatron: [{role: reward}]\n", "has the role 'reward'; it must be actor or critic"),
        ("megatron: [{role: actor}, {role: actor}]\n", "two entries for the role actor"),
        ("megatron: [{role: actor, override: {}}]\n", "has the key override"),
    ],
)
def test_a_wrong_file_is_refused(make_args, roles, text, says):
    with pytest.raises(ConfigError) as caught:
        slime_validate_args(make_args("--megatron-config-path", roles(text)))
    assert says in str(caught.value)
