"""GPUs among those that a process can see."""

import pytest

from slime.utils.env import visible_index
from slime.utils.errors import ConfigError


@pytest.mark.parametrize(("visible", "physical", "index"), [(None, 5, 5), ("4,5,6,7", 5, 1), (" 0 , 3", 3, 1)])
def test_a_gpu_is_counted_among_the_visible_ones(monkeypatch, visible, physical, index):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_index(physical) == index


def test_a_hidden_gpu_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="GPU 3, but CUDA_VISIBLE_DEVICES is 0,1"):
        visible_index(3)


def test_a_trainer_rank_takes_the_place_of_its_gpu_among_the_visible_ones(monkeypatch):
    from slime.backends.train_worker import TrainWorker
    from slime.ray.train_actor import TrainRayActor

    class Rank(TrainRayActor, TrainWorker):
        """Without what a trainer is for."""

    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # put back after the test
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    Rank.__abstractmethods__ = frozenset()
    rank = Rank()
    rank.set_rendezvous(2, 1, "127.0.0.1", 20000, 3)
    assert rank.local_rank == 1
