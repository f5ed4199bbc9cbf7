"""Pages of the site that no file of docs/ holds; mkdocs.yml names this file."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import results_page
from scripts import api_page

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

REPO = Path(__file__).parents[1]
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"
"""Tables of numbers name every feature, and would stand before the pages that explain it."""
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of examples/ into the navigation."""
    section = next(entry for entry in config.nav if "Examples" in entry)
    section["Examples"] = list(example_pages())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the results of benchmarks/results, the Python reference, and the pages of examples/."""
    from mkdocs.structure.files import File

    pages = {"results.md": NOT_SEARCHED + results_page.page(), "api.md": api_page.page()}
    pages |= {name: _moved(page) for name, page in example_pages().items()}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def example_pages() -> dict[str, Path]:
    """Return the name on the site of every page of examples/."""
    found = sorted(REPO.glob("examples/*/README.md"))
    return {"examples/index.md": REPO / "examples/README.md"} | {f"examples/{p.parent.name}.md": p for p in found}


def _moved(page: Path) -> str:
    """Return the page with its links from ``examples/``; what the site lacks is named by its path."""
    places = {path: name for name, path in example_pages().items()}

    def link(found: re.Match[str]) -> str:
        target = (page.parent / found[1]).resolve()
        if target in places:
            name = places[target]
        elif target.is_relative_to(REPO / "docs"):
            name = str(target.relative_to(REPO / "docs"))
        else:
            return f"] (`{target.relative_to(REPO)}`)"
        return f"]({os.path.relpath(name, 'examples')}{found[2] or ''})"

    text = LINK.sub(link, page.read_text(encoding="utf-8"))
    return re.sub(r"(?<!\!)\[([^\[\]]+)\] \((`[^`]+`)\)", r"\1 (\2)", text)
