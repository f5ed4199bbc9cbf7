"""The gauges count what they claim, and golden numbers differ by a bit."""

from __future__ import annotations

from tests.golden.__main__ import differences


def test_golden_numbers_differ_by_a_bit_a_step_and_a_name():
    recorded = {"steps": [{"loss": 0.1}], "rollouts": [{"tokens": "ab"}]}
    assert differences(recorded, recorded) == []
    assert len(differences(recorded, {"steps": [{"loss": 0.1 + 2**-56}], "rollouts": [{"tokens": "ab"}]})) == 1
    assert len(differences(recorded, {"steps": [], "rollouts": [{"token": "ab"}]})) == 3
