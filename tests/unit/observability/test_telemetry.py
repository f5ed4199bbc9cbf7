"""A process's telemetry stream opens all of its sinks, or none."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.observability import telemetry


class First(telemetry.Sink):
    closed = 0

    def __init__(self, args: Namespace, process: str, *, primary: bool) -> None: ...

    def close(self) -> None:
        type(self).closed += 1


class Refusing(First):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise OSError("no room")


def test_a_sink_that_does_not_open_closes_those_before_it(tmp_path):
    with pytest.raises(OSError, match="no room"):
        telemetry.start(Namespace(save=str(tmp_path)), "driver", (First, Refusing), primary=True)
    telemetry.stop()
    assert First.closed == 1
