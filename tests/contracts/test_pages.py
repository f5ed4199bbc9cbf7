"""The hand-written pages name only existing files, flags and plug-ins."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from slime.compose import flag_groups
from slime.flags.parse import build_parser
from tests.contracts.source_tree import REPO

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md", *sorted((REPO / "docs").rglob("*.md"))]
PAGES += sorted((REPO / "examples").glob("**/*.md"))
ROOTS = ("slime", "slime_plugins", "scripts", "tests", "docs", "examples", "tools", "requirements", "benchmarks")
RESULTS = sorted((REPO / "benchmarks/results").glob("*.json"))
PATH = re.compile(rf"(?<![\w/{{}}.])(?:{'|'.join(ROOTS)})/[\w./-]*")
LINK = re.compile(r"\]\(([^)#:]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z0-9][a-z0-9-]*")

OF_EXAMPLES = {
    "slime/algorithms/advantages/step_rewards.py",
    "slime_plugins/models/acme/family.py",
    "slime_plugins/models/acme/layers.py",
}
"""Files that the example commits of CONTRIBUTING.md add."""
BUILT = {"docs/results.md", "docs/api.md"}
"""Pages that scripts/site_pages.py writes."""
OF_OTHER_PROGRAMS = {
    "--num-gpus",  # ray start
    "--rm-patience-s",  # the example of CONTRIBUTING.md
    "--fix",  # scripts/check
    "--async",  # slime train
    *("--local-dir", "--repo-type"),  # hf download
    *("--nnodes", "--node-rank"),  # torchrun
    *("--tiny-dir", "--work-dir", "--fully-async"),  # tests/ext/ledger/kill_resume.py
    *("--sglang-", "--router-"),  # prefixes, in docs/flags.md
    *("--family", "--check", "--layout", "--write-docs", "--recipe"),  # tests.matrix, tests.matrix.quantized
    "--only",  # tests.algorithms
    *("--group", "--sample", "--prompt", "--repeats"),  # tools/ledger.py, benchmarks
    "--custom-weight-loader",  # sglang.launch_server
    # the conversion tools of docs/quantization.md
    *("--model-dir", "--save-dir", "--strategy", "--block-size", "--scale-fmt", "--max-workers", "--device"),
    *("--input-fp8-hf-path", "--output-bf16-hf-path", "--ignore-rules", "--files", "--data-dir", "--overwrite"),
    "--gguf",  # tools/convert_gguf_to_hf.py
    *("--layers", "--experts", "--model", "--models", "--no-ledger", "--sweep"),  # benchmarks
    *("--input-dir", "--output-dir", "--origin-hf-dir"),  # tools/convert_torch_dist_to_hf.py
    # tools/plan.py, benchmarks/plan_memory.py
    *(
        "--gpus",
        "--gpu",
        "--gpu-memory",
        "--host-memory",
        "--mfu",
        "--lengths",
        "--json",
        "--ranks",
        "--case",
        "--plan-only",
    ),
    *("--trust-script", "--image"),
    *("--rm", "--generate", "--loss", "--tools", "--list", "--engine-answer", "--timeout-s"),  # slime check
    *("--corpus", "--port"),  # examples/search-r1/local_search_server.py
    *("--host", "--secret-file"),  # slime_plugins.rollout_buffer.buffer
    "--parallel",  # tests.seeds
    *("--ipc", "--ulimit", "--network", "--build-arg", "--shm-size", "--security-opt"),  # docker
    *("--append", "--secret"),  # wandb sync, sky launch
    *(
        "--step",
        "--set",
        "--pdb",
        "--micro-batch",
        "--sample",
        "--rollout",
        "--html",
        "--beside",
        "--text",
    ),  # tools/replay.py, tools/diff.py, tools/report.py
    *("--fit-for-grpo", "--kill-after"),  # examples/tiny_arithmetic/hf_accuracy.py, tests/ext/ledger/kill_resume.py
}


@cache
def known_flags() -> frozenset[str]:
    """Every training flag except those that mirror the installed SGLang."""
    return frozenset(build_parser(with_engine_flags=False, groups=flag_groups())._option_string_actions)


def is_engine_flag(flag: str) -> bool:
    return flag.startswith(("--sglang-", "--router-", "--prefill-num-servers"))


def ids(page: Path) -> str:
    return str(page.relative_to(REPO))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    named = {match.rstrip("./") for match in PATH.findall(text)}
    links = {str((page.parent / link).resolve().relative_to(REPO)) for link in LINK.findall(text)}
    assert sorted(name for name in (named | links) - OF_EXAMPLES - BUILT if not (REPO / name).exists()) == []


def test_files_that_results_name_exist():
    named = {(file.name, match.rstrip("./")) for file in RESULTS for match in PATH.findall(file.read_text())}
    assert len(named) >= 50
    assert sorted(item for item in named if not (REPO / item[1]).exists()) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ("flags.md", "hooks.md")], ids=ids)
def test_flags_that_a_page_names_exist(page):
    named = set(FLAG.findall(page.read_text(encoding="utf-8")))
    unknown = {flag for flag in named - OF_OTHER_PROGRAMS - known_flags() if not is_engine_flag(flag)}
    assert sorted(unknown) == []


def test_what_has_been_run_has_the_date_of_its_file():
    rows = re.findall(
        r"\| (\d{4}-\d\d-\d\d) \| .*?\((benchmarks/results/\w+\.json)\)", (REPO / "README.md").read_text()
    )
    assert len(rows) >= 8
    assert rows == [(json.loads((REPO / file).read_text())["date"], file) for _, file in rows]


def test_nothing_names_our_extras_by_the_name_of_another_package_on_the_index():
    """On the package index, ``slime`` is an unrelated package; installing it would run its code."""
    roots = ("slime", "examples", "tools", "scripts")
    files = [*PAGES, *(path for root in roots for path in (REPO / root).rglob("*"))]
    texts = {path: path.read_text() for path in files if path.suffix in {".md", ".py", ".sh"}}
    assert [str(path) for path, text in texts.items() if re.search(r"install [^#\n]*[ '\"]slime\b", text)] == []
