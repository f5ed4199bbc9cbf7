"""Every known bug, put back into the code, is caught by a test named for it.

``python -m tests.mutations`` runs all checks of each; here each bug has its first one, and slow ones are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations import sample_functions
from tests.mutations.mutation import Mutation
from tests.mutations.runner import Verdict, verdicts_of_cells, verdicts_of_tests_in_fork
from tests.mutations.table import MUTATIONS

REPO = Path(__file__).resolve().parents[2]
QUICK = {mutation.bug: mutation.with_one_check() for mutation in MUTATIONS if not mutation.is_slow}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Verdict]]:
    fitting = [mutation for mutation in QUICK.values() if not mutation.why_it_does_not_apply()]
    found = verdicts_of_tests_in_fork([mutation for mutation in fitting if mutation.tests])
    found |= verdicts_of_cells([mutation for mutation in fitting if mutation.cells])
    return {mutation.bug: of_bug for mutation, of_bug in found.items()}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.bug)
def test_every_mutation_fits_the_code_as_it_is(mutation):
    assert mutation.why_it_does_not_apply() == ""


def test_every_test_that_looks_for_a_mutation_exists():
    named = {test.partition("[")[0].partition("::")[::2] for mutation in MUTATIONS for test in mutation.tests}
    assert [(file, test) for file, test in named if f"def {test}(" not in (REPO / file).read_text()] == []


@pytest.mark.dist
@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", QUICK)
def test_a_known_bug_is_caught(verdicts, bug):
    for verdict in verdicts[bug]:
        assert verdict.is_sound, f"{verdict.check} fails without the bug"
        assert verdict.is_caught, f"{verdict.check} does not notice it: {verdict.reason or 'it passes'}"


def test_bugs_have_names_of_their_own():
    assert len({mutation.bug for mutation in MUTATIONS}) == len(MUTATIONS)


# The patching itself


def patch(target: str, old: str, new: str) -> Mutation:
    return Mutation(bug="-", target=f"tests.mutations.sample_functions:{target}", old=old, new=new, tests=("-",))


def test_every_holder_of_the_function_has_the_mutated_one_and_then_the_function_again():
    held = sample_functions.TABLE["doubled"]
    with patch("doubled", "2 * x", "3 * x").applied():
        assert held(1) == sample_functions.doubled(1) == 3
    assert held(1) == sample_functions.doubled(1) == 2


def test_methods_decorated_functions_and_closures_are_patched():
    assert sample_functions.Child().name() == "child of parent"
    with patch("Child.name", "child of", "twin of").applied():
        assert sample_functions.Child().name() == "twin of parent"
    with patch("Child.made", '"made"', '"twin"').applied():
        assert sample_functions.Child.made() == "twin"
    with patch("cached", "x + 1", "x + 2").applied():
        assert sample_functions.cached(1) == 3
    assert (sample_functions.Child().name(), sample_functions.Child.made(), sample_functions.cached(1)) == (
        "child of parent",
        "made",
        2,
    )


def test_a_patch_that_no_longer_fits_says_so():
    assert "0 times, not once" in patch("doubled", "4 * x", "5 * x").why_it_does_not_apply()
    assert "no attribute" in patch("gone", "", "").why_it_does_not_apply()
    assert "SyntaxError" in patch("doubled", "2 * x", "2 *").why_it_does_not_apply()
