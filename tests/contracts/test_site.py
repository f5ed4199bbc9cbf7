"""The pages form a site: links, anchors and paths hold, nothing comes from the network, and it stays readable."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from pymdownx.slugs import slugify

from tests.contracts.source_tree import REPO

OUTSIDE = [REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
OUTSIDE += sorted((REPO / "examples").glob("**/*.md"))
"""Pages that the site does not hold; mkdocs checks the others."""
GENERATED = {"flags.md", "hooks.md"}
WORD_LIMIT = 24_000
GENERATED_TABLE = re.compile(r"<!-- written by .*?<!-- end of the table -->", flags=re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ASSET = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(https?:[^\"]+)\"")

slug = slugify(case="lower")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {slug(re.sub(r"\]\([^)]*\)|[`*\[\]]", "", head), "-") for head in heads}


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: str(page.relative_to(REPO)))
def test_links_of_pages_outside_the_site_hold(page):
    dead = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        build(load_config(str(REPO / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=False))
    assert [record.getMessage() for record in caplog.records if record.name.startswith("mkdocs")] == []
    pages = sorted((tmp_path / "site").glob("*.html"))
    assert len(pages) > 25 and (tmp_path / "site/search/search_index.json").is_file()
    assert [page.name for page in pages if ASSET.search(page.read_text(encoding="utf-8"))] == []


def test_hand_written_pages_stay_short():
    pages = [*sorted((REPO / "docs").glob("*.md")), *OUTSIDE[:4]]
    pages = [page for page in pages if page.name not in GENERATED]
    texts = {page: GENERATED_TABLE.sub("", page.read_text(encoding="utf-8")) for page in pages}
    words = {str(page.relative_to(REPO)): len(text.split()) for page, text in texts.items()}
    assert sum(words.values()) <= WORD_LIMIT, sorted(words.items(), key=lambda item: -item[1])
