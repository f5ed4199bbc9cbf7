"""What is asked of engines before a push of packed weights."""

from __future__ import annotations

from typing import Any

import pytest

from slime.utils.errors import DeadlineError, EngineDiedError, EngineError, WeightSyncError
from slime.weights.push.participants import Participants, PushClock
from slime.weights.push.push import require_repacking
from slime.weights.push.state import Push


class Engine:
    def __init__(self, error: Exception | None = None, *, index: int = 3) -> None:
        self.error, self.asked, self.index, self.acknowledges = error, [], index, False

    def post_process_weights(self, **what: bool) -> Engine:
        self.asked.append(what)
        return self

    def wait(self, timeout_s: float) -> Any:
        if self.error:
            raise self.error


def test_an_engine_that_cannot_undo_its_repacking_is_refused_before_anything_is_paused() -> None:
    engine = Engine(EngineError("404: /post_process_weights"))
    with pytest.raises(WeightSyncError, match=r"engine 3 cannot undo that for a push \(404.*--custom-weight-loader"):
        require_repacking(Push("1", Participants([engine], PushClock(10))))


@pytest.mark.parametrize("error", [EngineDiedError("it has ended"), DeadlineError("no answer within 5 s")])
def test_an_engine_that_is_dead_or_hangs_is_excluded_and_the_others_are_asked(error: Exception) -> None:
    gone, other = Engine(error), Engine(index=4)
    participants = Participants([gone, other], PushClock(10))
    require_repacking(Push("1", participants))
    assert participants.reasons == {3: f"{type(error).__name__}: {error} (while asking for a push's needs)"}
    assert len(other.asked) == 1


def test_an_engine_that_can_is_asked_to_do_nothing() -> None:
    engine = Engine()
    require_repacking(Push("1", Participants([engine], PushClock(10))))
    assert engine.asked == [{"restore_weights_before_load": False, "post_process_quantization": False}]


def test_our_loader_needs_no_endpoint_for_that() -> None:
    engine = Engine(EngineError("404: /post_process_weights"))
    engine.acknowledges = True
    require_repacking(Push("1", Participants([engine], PushClock(10))))
    assert engine.asked == []
