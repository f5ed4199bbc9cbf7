"""No file of a record contains a secret."""

from __future__ import annotations

import logging

from tests.ext.record import recording
from tests.unit.utils import test_redaction
from tests.unit.utils.test_redaction import KEY, PLACES, assert_absent

args = test_redaction.args


def test_no_file_of_a_record_holds_a_secret(args, tmp_path):
    recording.start(args, "driver", primary=True)
    for name, value in PLACES.values():
        recording.event("told", **{name: value})
        recording.event("said", text=f"{name}={value}", others=[{"text": value}])
        recording.span("work", 0.0, 1.0, **{name: value})
        logging.getLogger("slime.x").warning("%s: %s=%s", "it is", name, value)
    recording.event("met", text=f"the plain {KEY}")
    recording.stop()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.json", "events.jsonl", "spans.json"} <= {path.name for path in files}
    for path in files:
        assert_absent(path.read_text())
