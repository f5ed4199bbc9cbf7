"""A trainer that ends between steps waits no longer than the base class."""

from __future__ import annotations

import pytest

from slime.ext.fast_push.disk.released_trainer import ReleasedTrainGroup
from tests.unit.ray.test_deadlines import FLAGS, Anything, first_wait_s


def test_the_engines_have_their_own_deadline_to_take_room_for_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ReleasedTrainGroup(FLAGS, 0, 0, pg=None)
    group.push.manager = Anything()
    waited_s = first_wait_s(monkeypatch, "slime.ray.push", group.update_weights)
    assert waited_s == pytest.approx(3 * (50 + 120) + 30 + 180, abs=1)
