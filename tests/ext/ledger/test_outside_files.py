"""Foreign or broken ledgers and positions: no code runs, nothing hangs, no secret is in them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.ext.ledger.journal import config_fingerprint
from slime.ext.ledger.ledger import position_path
from slime.ext.ledger.sample_codec import EntryEncoder, apply_entry, snapshot
from slime.rollout import plain_values
from slime.utils.errors import DataError
from slime.utils.types import Sample
from tests.ext.ledger.test_ledger import Process
from tests.unit.rollout.test_positions import Payload
from tests.unit.utils.test_redaction import PLACES, assert_absent

pytestmark = pytest.mark.timeout(30)  # an endless read fails


@pytest.fixture
def position(tmp_path: Path) -> Path:
    """The position of a checkpoint while two groups are issued."""
    process = Process(tmp_path / "run")
    process.rollout(0)
    process.source.get_samples(2)
    process.save(0)
    process.die()
    return position_path(str(tmp_path / "run"), 0)


@pytest.mark.parametrize(
    "write", [lambda value, path: torch.save(value, path), lambda v, p: p.write_bytes(pickle.dumps(v))]
)
def test_a_position_from_a_stranger_runs_no_code(tmp_path: Path, position: Path, write: Any) -> None:
    write({"first": 0, "open": [], "x": Payload(tmp_path / "marker")}, position)
    with pytest.raises(DataError, match="posix.mkdir|os.mkdir"):
        Process(tmp_path / "run", start=1)
    assert not (tmp_path / "marker").exists()


def test_a_field_or_metrics_in_the_ledger_from_a_stranger_run_no_code(tmp_path, caplog, monkeypatch):
    marker = tmp_path / "marker"
    monkeypatch.setattr(plain_values, "dumps", lambda value, **names: pickle.dumps(value))
    sample = Sample(prompt="p", metadata={"x": Payload(marker)})
    description, chunks = EntryEncoder().encode(None, snapshot(sample), None)
    with pytest.raises(DataError, match="Sample.metadata, holds posix.mkdir"):
        apply_entry(None, description, memoryview(b"".join(chunks)))
    process = Process(tmp_path / "run")
    record = process.ledger.journal.record_batch
    process.ledger.journal.record_batch = lambda rollout_id, groups, metrics, **flags: record(
        rollout_id, groups, {"x": Payload(marker)}, **flags
    )
    process.rollout(0)
    process.die()
    assert Process(tmp_path / "run").rollout(0) == [0, 1]
    assert not marker.exists()
    assert "the metrics of rollout 0, holds posix.mkdir" in caplog.text


def test_the_fingerprint_of_the_flags_holds_no_secret() -> None:
    for name, value in PLACES.values():
        flags: Any = type("Flags", (), {"__getattr__": lambda self, flag, value={name: value}: value})()
        assert_absent(str(config_fingerprint(flags)))
