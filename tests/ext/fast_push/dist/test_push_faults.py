"""Whatever an engine does in a push: each engine serves a complete version under its name, or is excluded and named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.ext.fast_push.dist.fault_engine import EngineHall
from tests.ext.fast_push.dist.push_fault_case import MODES, Case, Outcome, digest_of, push_all
from tests.matrix.pool import RankPool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1800)]

DIES = (
    "dies pause:before",
    "dies flush:before",
    "dies begin:before",
    "dies begin:after",
    "dies receive:before",
    "dies receive:during",
    "dies receive:after",
    "dies acknowledge:before",
    "dies acknowledge:after",
    "dies commit:before",
    "dies commit:after",
    "dies version:before",
    "dies continue:before",
    "dies continue:after",
)
DIES_IN_A_GROUP = ("dies join:before", "dies join:after", "dies receive:in")
LIES = (
    "corrupts receive",
    "loses receive",
    "complains acknowledge",
    "stale acknowledge",
    "mislabels commit",
    "forgets commit",
    "refuses begin:before",
    "refuses receive:before",
    "refuses receive:after",
    "refuses acknowledge:before",
    "refuses commit:before",
    "refuses continue:before",
)
SLOW = ("slow pause:before", "slow begin:after", "slow receive:during", "slow acknowledge:before", "slow commit:after")
SLOW_IN_A_GROUP = ("slow join:before", "slow receive:in", "slow acknowledge:before")
HARMLESS = ("", "twice receive", "repeats receive_weight_bucket", "repeats acknowledge_weight_update")
SLOW_TIMEOUT_S = 6.0
"""Seconds of the whole push: a slow engine gets half, the others must finish in the rest."""


def cases() -> list[Case]:
    """Every mode with every fault that it can have."""
    table = []
    for mode, place in MODES.items():
        for victim in (0, 1) if mode == "mixed" else (1,):
            is_outside = place.engines[victim][0] >= 2
            dies, slow = DIES, SLOW if mode == "colocated" else ()
            if is_outside:
                dies, slow = (
                    (*DIES, *DIES_IN_A_GROUP),
                    SLOW_IN_A_GROUP if mode == "distributed" else ("slow receive:in",),
                )
            table += [Case(mode, fault, victim) for fault in (*HARMLESS, *dies, *LIES)]
            table += [Case(mode, fault, victim, timeout_s=SLOW_TIMEOUT_S) for fault in slow]
    return table


CASES = cases()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    with tempfile.TemporaryDirectory(prefix="push-") as folder, EngineHall(Path(folder)) as hall, RankPool() as pool:
        ranks = pool.run(push_all, 2, hall.address, CASES, timeout_s=600)
    return {case.name: [rank[position] for rank in ranks] for position, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_engine_serves_a_whole_version_or_is_fenced_and_named(
    outcomes: dict[str, list[Outcome]], case: Case
) -> None:
    first, second = outcomes[case.name]
    assert first.excluded == second.excluded, "all ranks know the same"
    assert not first.error
    is_harmless = case.fault in HARMLESS
    assert set(first.excluded) == (set() if is_harmless else {case.victim})
    assert all(first.excluded.values())
    for index, state in enumerate(first.states):
        whole = {(str(first.old), digest_of(first.old)), (str(first.new), digest_of(first.new))}
        if index not in first.excluded:
            assert state is not None
            assert not state["is_paused"]
            assert (state["version"], set(state["digest"])) == (str(first.new), {digest_of(first.new)})
        if state is not None:
            served = {(version, digest) for version, digests in state["served"] for digest in digests}
            assert served <= whole, "never a mix, never a wrong name"
            if index in first.excluded and not case.fault.startswith(("slow pause", "slow continue")):
                assert state["is_paused"], "an excluded engine serves nothing"


def test_the_push_is_repeated_only_where_a_broadcast_broke(outcomes: dict[str, list[Outcome]]) -> None:
    repeated = {name for name, (first, _) in outcomes.items() if first.num_attempts > 1}
    assert repeated == {
        case.name
        for case in CASES
        if MODES[case.mode].engines[case.victim][0] >= 2 and "receive:" in case.fault and "repeats" not in case.fault
    }
