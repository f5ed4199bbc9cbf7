"""A trainer that ends between two steps waits no longer than the base class."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.ext.fast_push.disk.released_trainer import ReleasedTrainGroup

FLAGS = Namespace(
    save=None,
    weight_update_timeout_s=30.0,
    engine_start_timeout_s=50.0,
    offload_rollout=True,
    debug_train_only=False,
    use_fault_tolerance=False,
)


class Anything:
    """A handle whose every method is remote."""

    def __getattr__(self, name: str) -> Any:
        return Namespace(remote=lambda *args, **kwargs: name)


def test_the_engines_have_their_own_deadline_to_take_room_for_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def wait_for(refs: Any, *, what: str, timeout_s: float, **rest: Any) -> Any:
        assert what
        given.append(timeout_s)
        return [{}] if isinstance(refs, list) else {}

    monkeypatch.setattr("slime.ray.push.wait_for", wait_for)
    group = ReleasedTrainGroup(FLAGS, 0, 0, pg=None)
    group.push.manager = Anything()
    group.update_weights()
    assert given[0] == pytest.approx(3 * (50 + 120) + 30 + 180, abs=1)
