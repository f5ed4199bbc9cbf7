"""Pages of the site that no file of docs/ holds; mkdocs.yml names this file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import results_page

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of all results, made from benchmarks/results."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "results.md", content=results_page.page()))
    return files
