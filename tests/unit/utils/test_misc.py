"""Helper functions that plug-ins import."""

import collections
import socket
import subprocess

import pytest

from slime.utils import misc, net
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


def test_a_singleton_keeps_its_first_instance_until_it_is_cleared():
    class One(metaclass=misc.SingletonMeta):
        def __init__(self, value):
            self.value = value

    class Two(One):
        pass

    assert One(1) is One(2)
    assert Two(3).value == 3
    misc.SingletonMeta.clear_instances(One)
    assert One(4).value == 4
    assert Two(5).value == 3


def test_exec_command_returns_output_and_fails_loudly():
    assert misc.exec_command("echo hi", capture_output=True) == "hi\n"
    assert misc.exec_command("true") is None
    with pytest.raises(subprocess.CalledProcessError):
        misc.exec_command("exit 3")


def test_a_port_in_use_is_passed_over():
    start = net.get_free_port(20000, consecutive=3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", start + 1))
        taken.listen(1)
        assert not net.is_port_available(start + 1)
        assert net.get_free_port(start, consecutive=2) > start + 1
        assert net.get_free_port(start) == start
    assert net.is_port_available(net.find_available_port(3500))


def test_a_plain_copy_shares_nothing_and_keeps_what_is_not_plain():
    value = {"stop": ["a"], "nested": [{"ids": [1, 2]}], "box": collections.OrderedDict(a=[1]), "none": None}
    twin = misc.copy_plain(value)
    assert twin == value and type(twin["box"]) is collections.OrderedDict
    twin["stop"].append("b")
    twin["nested"][0]["ids"].append(3)
    twin["box"]["a"].append(2)
    assert value == {"stop": ["a"], "nested": [{"ids": [1, 2]}], "box": {"a": [1]}, "none": None}
