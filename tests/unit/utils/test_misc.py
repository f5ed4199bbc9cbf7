"""The small tools that plug-ins import."""

import collections

import pytest

from slime.utils import misc
from slime.utils.errors import HookError


@pytest.mark.parametrize(
    ("rollout_id", "interval", "per_epoch", "num_rollout", "due"),
    [
        (0, None, None, 1, False),
        (1, 2, None, None, True),
        (0, 2, None, None, False),
        (2, 100, 3, None, True),
        (4, 100, None, 5, True),
        (3, 100, None, 5, False),
        (0, 2, 0, None, False),  # fewer prompts than a rollout takes: it may end several epochs
        (1, 2, 0, None, True),
    ],
)
def test_a_periodic_action_is_due_at_its_interval_epoch_end_and_run_end(
    rollout_id, interval, per_epoch, num_rollout, due
):
    assert misc.should_run_periodic_action(rollout_id, interval, per_epoch, num_rollout) is due


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("join", "package.module.attribute"),
        ("os.path:join", "dots only"),
        ("no_such_package.thing", "importing no_such_package raised ModuleNotFoundError"),
        ("os.path.jion", "no attribute 'jion'"),
    ],
)
def test_a_path_that_cannot_be_loaded_says_why(path, message):
    with pytest.raises(HookError, match=message):
        misc.load_function(path)


def test_a_plain_copy_shares_nothing_and_keeps_what_is_not_plain():
    value = {"stop": ["a"], "nested": [{"ids": [1, 2]}], "box": collections.OrderedDict(a=[1]), "none": None}
    twin = misc.copy_plain(value)
    assert twin == value and type(twin["box"]) is collections.OrderedDict
    twin["stop"].append("b")
    twin["nested"][0]["ids"].append(3)
    twin["box"]["a"].append(2)
    assert value == {"stop": ["a"], "nested": [{"ids": [1, 2]}], "box": {"a": [1]}, "none": None}
