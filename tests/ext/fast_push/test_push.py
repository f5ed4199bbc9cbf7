"""What is requested from engines before a push of packed weights."""

from __future__ import annotations

from typing import Any

import pytest

from slime.ext.fast_push.push import _without_loader
from slime.utils.errors import DeadlineError, EngineDiedError, EngineError, WeightSyncError
from slime.weights.push.participants import Participants, PushClock
from slime.weights.push.state import Push


class Engine:
    def __init__(self, error: Exception | None = None, *, index: int = 3) -> None:
        self.error, self.asked, self.index, self.loaders = error, [], index, ()

    def post_process_weights(self, **what: bool) -> Engine:
        self.asked.append(what)
        return self

    def wait(self, timeout_s: float) -> Any:
        if self.error:
            raise self.error


def require(*engines: Engine) -> Participants:
    push = Push("1", Participants(engines, PushClock(10)))
    push.require_repacking(_without_loader(push))
    return push.participants


def test_an_engine_that_cannot_undo_its_repacking_is_refused_before_anything_is_paused() -> None:
    engine = Engine(EngineError("404: /post_process_weights"))
    with pytest.raises(WeightSyncError, match=r"engine 3 cannot undo that for a push \(404.*--custom-weight-loader"):
        require(engine)


@pytest.mark.parametrize("error", [EngineDiedError("it has ended"), DeadlineError("no answer within 5 s")])
def test_an_engine_that_is_dead_or_hangs_is_excluded_and_the_others_are_asked(error: Exception) -> None:
    gone, other = Engine(error), Engine(index=4)
    participants = require(gone, other)
    assert participants.reasons == {3: f"{type(error).__name__}: {error} (while asking for a push's needs)"}
    assert len(other.asked) == 1
