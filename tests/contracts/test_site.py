"""The pages form a site: links, anchors and paths work, nothing needs the network, and it stays readable."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from pymdownx.slugs import slugify

from scripts import api_page
from tests.contracts.site_search import SiteSearch
from tests.contracts.source_tree import REPO

OUTSIDE = [REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
OUTSIDE += sorted((REPO / "examples").glob("**/*.md"))
"""Pages outside the site; mkdocs checks the others."""
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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, and the build's warnings."""
    folder, warnings = tmp_path_factory.mktemp("site"), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("mkdocs").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build(load_config(str(REPO / "mkdocs.yml"), site_dir=str(folder), strict=False))
    logging.getLogger("mkdocs").removeHandler(handler)
    return folder, warnings


@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning_and_needs_no_network(site):
    folder, warnings = site
    assert warnings == []
    pages = sorted(folder.rglob("*.html"))
    assert len(pages) > 40 and (folder / "search/search_index.json").is_file()
    assert [page.name for page in pages if ASSET.search(page.read_text(encoding="utf-8"))] == []


QUESTIONS = {
    "my reward": "howto/reward.html",
    "OOM": "howto/memory.html",
    "2 nodes": "howto/nodes.html",
    "reward flat": "howto/flat_reward.html",
    "resume": "howto/resume.html",
    "multi-turn tools": "howto/tools.html",
    "wandb": "howto/wandb.html",
    "evaluate": "howto/evaluation.html",
    "LoRA": "lora.html",
    "my HF dataset": "howto/data.html",
    "DAPO": "howto/dapo.html",
    "docker": "howto/docker.html",
    "slurm": "howto/nodes.html",
    "kuberay": "howto/kubernetes.html",
    "llm judge": "howto/judge.html",
    "append_response_tokens": "api.html",
}
"""What a new user searches for, and the page that answers it."""


@pytest.mark.timeout(300)
def test_the_questions_of_a_new_user_find_their_page_first(site):
    search = SiteSearch(site[0] / "search/search_index.json")
    assert {question: search.pages(question)[0] for question in QUESTIONS} == QUESTIONS
    assert not any(doc["location"].startswith("results.html") for doc in search.docs)


@pytest.mark.parametrize("section", api_page.SECTIONS, ids=lambda section: section[0])
def test_the_names_of_the_python_reference_can_be_imported_as_it_says(section):
    _, module, _, names = section
    assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []


def test_hand_written_pages_stay_short():
    pages = [*sorted((REPO / "docs").rglob("*.md")), *OUTSIDE[:4]]
    pages = [page for page in pages if page.name not in GENERATED]
    texts = {page: GENERATED_TABLE.sub("", page.read_text(encoding="utf-8")) for page in pages}
    words = {str(page.relative_to(REPO)): len(text.split()) for page, text in texts.items()}
    assert sum(words.values()) <= WORD_LIMIT, sorted(words.items(), key=lambda item: -item[1])
