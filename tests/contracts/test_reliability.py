"""docs/reliability.md is true: its names exist, its flags are read where it says, and no other wait is without end."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.contracts.reliability_page import PAGE, constant, flag_defaults, module_path, page
from tests.contracts.reliability_table import AREAS, EDGES, OUTSIDE, PROMISES, UNTIMED, Edge, Promise
from tests.contracts.source_tree import REPO, module_name, tree_of
from tests.contracts.waits import Wait, rollout_side_files, waits_in, waits_of


@cache
def all_waits() -> tuple[Wait, ...]:
    return tuple(wait for path in rollout_side_files() for wait in waits_of(path))


def ids(row: Edge | Promise) -> str:
    return row.waits if isinstance(row, Edge) else row.fails


def find(tree: ast.AST, names: list[str]) -> ast.AST | None:
    """The class or function ``names`` of a module."""
    for name in names:
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        found = next((n for n in ast.iter_child_nodes(tree) if isinstance(n, kinds) and n.name == name), None)
        if found is None:
            return None
        tree = found
    return tree


def test_the_page_is_written_from_the_table():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.contracts.reliability_page"


@pytest.mark.parametrize("edge", EDGES, ids=ids)
def test_what_a_row_names_exists(edge):
    assert edge.area in AREAS
    for name in edge.code:
        path, inside = module_path(name)
        assert inside and find(tree_of(path), inside) is not None, f"there is no {name}"
    for bound in edge.bounds:
        if bound.startswith("--"):
            assert bound in flag_defaults()
        else:
            assert constant(bound) >= 0
    assert edge.bounds or edge.deadline, "a row without a deadline"
    assert edge.outcome and edge.log


@pytest.mark.parametrize("edge", [*EDGES, *PROMISES], ids=ids)
def test_a_row_names_the_tests_that_show_it(edge):
    assert edge.tests, "a row that nothing shows"
    for test in edge.tests:
        file, _, name = test.partition("::")
        assert name.startswith("test_") and find(tree_of(REPO / file), [name]) is not None, f"there is no {test}"


@pytest.mark.parametrize("edge", EDGES, ids=ids)
def test_the_code_of_a_row_reads_its_bounds_and_raises_its_error(edge):
    """In the modules that the row names, or in those that these import from."""
    sources = "\n".join(module_path(name)[0].read_text(encoding="utf-8") for name in edge.code)
    for bound in edge.bounds:
        name = bound.removeprefix("--").replace("-", "_") if bound.startswith("--") else bound.rpartition(".")[2]
        assert name in sources or name in _imported_sources(edge), f"{ids(edge)}: nothing reads {bound}"
    if edge.raises:
        assert edge.raises in sources or edge.raises in _imported_sources(edge)


@cache
def _imported_sources(edge: Edge) -> str:
    """The modules that those of the row import from."""
    texts = []
    for name in edge.code:
        for node in ast.walk(tree_of(module_path(name)[0])):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slime"):
                texts += [module_path(f"{node.module}.{alias.name}")[0].read_text("utf-8") for alias in node.names]
    return "\n".join(texts)


def test_every_module_that_waits_has_a_row():
    named = {module_name(module_path(name)[0]) for edge in EDGES for name in (*edge.code, *edge.bounds) if "." in name}
    waiting = {wait.module for wait in all_waits() if wait.is_timed}
    assert sorted(waiting - named - set(OUTSIDE)) == []


def test_no_wait_is_without_a_deadline_but_those_with_a_reason():
    untimed = {wait.place: f"{wait.place} (line {wait.line})" for wait in all_waits() if not wait.is_timed}
    assert sorted(untimed[place] for place in untimed.keys() - UNTIMED.keys()) == []
    assert sorted(UNTIMED.keys() - untimed.keys()) == [], "no longer there: take these out of the list"


@pytest.mark.parametrize(
    "line",
    [
        "ray.get(ref)",
        "ray.wait([ref], timeout=None)",
        "aiohttp.ClientSession()",
        "requests.post(url, json={})",
        "httpx.AsyncClient()",
        "queue.get()",
        "self._event.wait()",
        "thread.join()",
        "process.communicate()",
        "lock.acquire()",
        "subprocess.run(words, check=True)",
        "urllib.request.urlopen(url)",
        "future.result()",
    ],
)
def test_the_finder_knows_a_wait_without_a_deadline(line):
    (wait,) = waits_in(ast.parse(f"def f():\n    {line}\n"), "m")
    assert not wait.is_timed and wait.place.startswith("m.f: ")


@pytest.mark.parametrize(
    "line",
    [
        "await asyncio.gather(*tasks)",
        "await asyncio.wait(tasks)",
        "await event.wait()",
        "await actor.call.remote(1)",
    ],
)
def test_the_finder_knows_a_wait_of_a_coroutine(line):
    (wait,) = waits_in(ast.parse(f"async def f():\n    {line}\n"), "m")
    assert not wait.is_timed
    (limit, inside) = waits_in(ast.parse(f"async def f():\n  async with asyncio.timeout(3):\n    {line}\n"), "m")
    assert limit.is_timed and inside.is_timed


@pytest.mark.parametrize(
    "line",
    ["ray.get(ref, timeout=5)", "thread.join(3)", "process.wait(timeout=9)", "queue.get(timeout=1)", "event.wait(2)"],
)
def test_the_finder_knows_a_wait_with_a_deadline(line):
    assert all(wait.is_timed for wait in waits_in(ast.parse(f"def f():\n    {line}\n"), "m"))


@pytest.mark.parametrize("line", ['", ".join(words)', "os.path.join(a, b)", "table.get(key)", "table.get(key, None)"])
def test_the_finder_takes_nothing_else_for_one(line):
    assert [wait for wait in waits_in(ast.parse(f"def f():\n    {line}\n"), "m") if not wait.is_timed] == []
