"""Every ``path.py: function`` in the walks of docs/architecture.md exists."""

from __future__ import annotations

import ast
import re

import pytest

from tests.contracts.source_tree import REPO, tree_of

PAGE = re.sub(r"\n\s*", " ", (REPO / "docs/architecture.md").read_text(encoding="utf-8"))
NAMES = sorted(set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", PAGE)))
DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_the_three_walks_name_their_steps():
    assert len(NAMES) >= 40
    assert {"slime/train_data/split.py", "slime/ext/fast_push/push.py", "slime/ray/engines/group.py"} <= {
        path for path, _ in NAMES
    }


@pytest.mark.parametrize(("path", "name"), NAMES, ids=lambda word: word.rpartition("/")[2])
def test_a_step_of_a_walk_exists(path, name):
    node = tree_of(REPO / path)
    for part in name.split("."):
        found = [
            child for child in ast.iter_child_nodes(node) if isinstance(child, DEFINITIONS) and child.name == part
        ]
        assert found, f"{path} has no {name}"
        node = found[0]
