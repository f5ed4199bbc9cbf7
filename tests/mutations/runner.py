"""Runs the mutations: every test and cell of one passes without its bug, and fails with it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tests.matrix.pool import RankError, RankPool, fork_context
from tests.mutations.mutation import Mutation
from tests.oracle.agreement import BOUNDS, errors_of_cell
from tests.oracle.trainer import Cell, run_cells
from tests.oracle.variants import PACKING_OF, SEEDS

RANKS_S = 120.0
"""Seconds for the cells of one bug."""
TESTS_S = 380.0
"""Seconds for the tests of all bugs, if a caller waits for them."""
BROKEN_TWINS = ("NameError", "SyntaxError", "ImportError", "UnboundLocalError")
"""Errors that show a mistake in the mutation itself, so that catching it proves nothing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one check of one bug."""

    check: str
    """Test id, or ``oracle:layout:variant``."""
    is_sound: bool
    """Passes without the bug."""
    is_caught: bool
    """Fails with it."""
    reason: str
    """The failure."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A bug and all its verdicts."""

    mutation: Mutation
    verdicts: tuple[Verdict, ...]

    @property
    def is_caught(self) -> bool:
        """Whether every check named for it catches it."""
        return all(verdict.is_sound and verdict.is_caught for verdict in self.verdicts)


class _Failures:
    """A pytest plug-in that records the outcomes of tests."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed[report.nodeid] = crash.message if crash is not None else str(report.longrepr)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def run_tests(ids: Sequence[str]) -> _Failures:
    """Run tests by id in this process, quietly."""
    seen = _Failures()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(["-q", "-p", "no:cacheprovider", "--tb=short", *ids], plugins=[seen])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"{ids}: {code}\n{output.getvalue()[-3000:]}"
    return seen


def verdicts_of_tests(mutations: Iterable[Mutation]) -> dict[Mutation, list[Verdict]]:
    """Run every named test, once without any bug and once with each."""
    mutations = [mutation for mutation in mutations if mutation.tests]
    plain = run_tests(sorted({test for mutation in mutations for test in mutation.tests})) if mutations else None
    verdicts: dict[Mutation, list[Verdict]] = {}
    for mutation in mutations:
        with mutation.applied():
            seen = run_tests(mutation.tests)
        for test in mutation.tests:
            assert plain is not None
            reason = _shortened(_of(seen.failed, test))
            is_sound = not _of(plain.failed, test) and any(_is_of(test, name) for name in plain.passed)
            is_caught = bool(reason) and not reason.startswith(BROKEN_TWINS)
            verdicts.setdefault(mutation, []).append(Verdict(test, is_sound, is_caught, reason))
    return verdicts


def _is_of(test: str, name: str) -> bool:
    """Return True if a test belongs to an id without parameters, or to a whole file."""
    return name == test or name.startswith((f"{test}[", f"{test}::"))


def _of(failed: dict[str, str], test: str) -> str:
    return next((message for name, message in failed.items() if _is_of(test, name)), "")


def _shortened(message: str) -> str:
    return " ".join(message.split())[:160]


def verdicts_of_tests_in_fork(mutations: Sequence[Mutation]) -> dict[Mutation, list[Verdict]]:
    """Run ``verdicts_of_tests`` in a separate process, for callers that pytest itself runs."""
    context = fork_context()
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_verdicts, args=(list(mutations), sender))
    child.start()
    sender.close()
    try:
        assert receiver.poll(TESTS_S), f"no verdicts within {TESTS_S:g} s"
        verdicts: dict[Mutation, list[Verdict]] | str = receiver.recv()
    finally:
        child.join(timeout=5)
        if child.is_alive():
            child.kill()
    assert isinstance(verdicts, dict), verdicts
    return verdicts


def _send_verdicts(mutations: list[Mutation], sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        sender.send(verdicts_of_tests(mutations))
    except BaseException:  # noqa: BLE001 - the parent reports it
        sender.send(traceback.format_exc())


# Cells of the oracle, on real ranks


def verdicts_of_cells(mutations: Iterable[Mutation]) -> dict[Mutation, list[Verdict]]:
    """Run every named cell of the oracle, once without any bug and once with each, in separate processes."""
    mutations = [mutation for mutation in mutations if mutation.cells]
    if not mutations:
        return {}
    verdicts: dict[Mutation, list[Verdict]] = {}
    with RankPool() as pool:
        plain = sorted({cell for mutation in mutations for cell in mutation.cells})
        sound = _problems(pool, plain, None)
        for mutation in mutations:
            problems = _problems(pool, mutation.cells, mutation)
            verdicts[mutation] = [
                Verdict(f"oracle:{cell[0]}:{cell[1]}", not sound[cell], bool(problems[cell]), problems[cell])
                for cell in mutation.cells
            ]
    return verdicts


def _problems(
    pool: RankPool, cells: Sequence[tuple[str, str]], mutation: Mutation | None
) -> dict[tuple[str, str], str]:
    """Return how each cell differs from the reference, or how its processes ended."""
    try:
        results = run_cells(pool, _with_seeds(cells), mutation=mutation, timeout_s=RANKS_S)
    except RankError as error:
        return {cell: _shortened(str(error).strip().splitlines()[-1]) for cell in cells}
    return {cell: _problem(results, cell) for cell in cells}


def _with_seeds(cells: Sequence[tuple[str, str]]) -> list[Cell]:
    return [(layout, variant, PACKING_OF[variant], seed) for layout, variant in cells for seed in SEEDS]


def _problem(results: dict[Cell, list[dict[str, Any]]], cell: tuple[str, str]) -> str:
    layout, variant = cell
    for seed in SEEDS:
        errors = errors_of_cell(variant, seed, results[layout, variant, PACKING_OF[variant], seed])
        if not errors.within_bounds():
            worst = max(BOUNDS, key=lambda kind: getattr(errors, kind) / BOUNDS[kind])
            return f"{worst} off by {getattr(errors, worst):.1e}"
    return ""


def run_mutations(mutations: Sequence[Mutation]) -> list[Outcome]:
    """Return all verdicts of all mutations, in order; one that no longer fits the code has a verdict that says so."""
    stale = {mutation: problem for mutation in mutations if (problem := mutation.why_it_does_not_apply())}
    fitting = [mutation for mutation in mutations if mutation not in stale]
    of_tests, of_cells = verdicts_of_tests(fitting), verdicts_of_cells(fitting)
    verdicts = {mutation: (*of_tests.get(mutation, ()), *of_cells.get(mutation, ())) for mutation in fitting} | {
        mutation: (Verdict("the patch itself", False, False, problem),) for mutation, problem in stale.items()
    }
    return [Outcome(mutation, verdicts[mutation]) for mutation in mutations]


def as_plain(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Convert for JSON."""
    return [
        {
            "bug": outcome.mutation.bug,
            "target": outcome.mutation.target,
            "is_caught": outcome.is_caught,
            "verdicts": [dataclasses.asdict(verdict) for verdict in outcome.verdicts],
        }
        for outcome in outcomes
    ]
