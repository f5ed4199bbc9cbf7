"""GPUs visible to a process."""

import pytest

from slime.utils import env
from slime.utils.env import visible_index
from slime.utils.errors import ConfigError


@pytest.mark.parametrize(("visible", "physical", "index"), [(None, 5, 5), ("4,5,6,7", 5, 1), (" 0 , 3", 3, 1)])
def test_a_gpu_is_counted_among_the_visible_ones(monkeypatch, visible, physical, index):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_index(physical) == index


def test_a_trainer_rank_takes_the_place_of_its_gpu_among_the_visible_ones(monkeypatch):
    from slime.backends.train_worker import TrainWorker
    from slime.ray.train_actor import TrainRayActor

    class Worker(TrainWorker):
        """A worker without a trainer's work."""

    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # restored after the test
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    Worker.__abstractmethods__ = frozenset()
    rank = TrainRayActor(Worker)
    rank.set_rendezvous(2, 1, "127.0.0.1", 20000, 3)
    assert rank.worker.local_rank == 1


@pytest.mark.parametrize("value", ["many", "-1", "1.5", "1e3", "nan", "\u0663", "9" * 30])
def test_a_variable_that_is_no_number_is_named_with_its_value(monkeypatch, value):
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", value)
    with pytest.raises(ConfigError) as caught:
        env.int4_group_size()
    message = str(caught.value)
    assert (
        "OPEN_TRAINING_INT4_GROUP_SIZE is" in message and value in message and "whole number of 0 or more" in message
    )


@pytest.mark.parametrize(("value", "number"), [("", 7), ("  ", 7), ("0", 0), (" 64 ", 64)])
def test_a_variable_that_is_a_number_is_read_and_an_empty_one_is_the_default(monkeypatch, value, number):
    monkeypatch.setenv("SLIME_SCRIPT_NUM_NODES", value)
    assert env.get_int("SLIME_SCRIPT_NUM_NODES", 7) == number


def test_a_switch_that_says_neither_is_refused(monkeypatch):
    monkeypatch.setenv("SLIME_PREFER_IPV6", "perhaps")
    with pytest.raises(ConfigError, match="SLIME_PREFER_IPV6 is 'perhaps'; it must be 1 .yes. or 0 .no., or unset"):
        env.prefer_ipv6()
