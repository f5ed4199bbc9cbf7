"""Print the gauges of the house: from the source, and from a real tiny job.

    python scripts/gauges.py                 from the source, in seconds
    python scripts/gauges.py --jobs grpo     and what the golden job `grpo` imports and enters (tests/golden)
    python scripts/gauges.py --jobs grpo ppo sft lora    four of them together: which lines of the core they run

Figures are a mirror: one that moves because a rule was met by renaming is a defect.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import site
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

PACKAGES = ("slime", "slime_plugins")
EXTENSIONS = ("slime/ext/", "slime/agent/")
"""The folders of the first, and the package of the second, are extensions; the rest of ``slime/`` is the core."""
TRANSLATED = re.compile(
    r"\b(?:that of|what (?:it|they|he|she) lacks?|(?:goes|go|going|went) on|(?:is|are|was|were|be) told"
    r"|where there (?:is|are)|of (?:its|their) own|anew|(?:is|are) none|but for)\b",
    re.IGNORECASE,
)
"""Nine constructions of translated prose."""
IMPORT_RUNS = 3
IMPORT_LIMIT_S = 120


@cache
def source(path: Path) -> str:
    """Return the text of a file."""
    return path.read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(source(path))


def files(*folders: str) -> list[Path]:
    """Return the Python files below folders of the repository."""
    return sorted(path for folder in folders for path in (REPO / folder).rglob("*.py"))


def num_lines(paths: Iterable[Path]) -> int:
    """Return the lines of all files together."""
    return sum(source(path).count("\n") for path in paths)


def size(paths: Iterable[Path]) -> str:
    """Return the number of files, and of their lines."""
    paths = list(paths)
    return f"{len(paths)} files, {num_lines(paths):,} lines"


def is_core(path: Path) -> bool:
    """True for a file of ``slime/`` outside the extensions."""
    name = str(path.relative_to(REPO))
    return name.startswith("slime/") and not name.startswith(EXTENSIONS)


def path_of(module: str) -> Path | None:
    """Return the file of a module of ours; None for another one."""
    if module.partition(".")[0] not in {*PACKAGES, "train", "train_async"}:
        return None
    stem = REPO.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


@cache
def imports(path: Path, with_lazy: bool) -> frozenset[Path]:
    """Return the files of ours that a file imports, packages above them included; not those for type checkers."""
    found: set[str] = set()

    def visit(nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                visit(node.orelse)
            elif isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
            elif with_lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                visit(ast.iter_child_nodes(node))

    visit(tree(path).body)
    parts = {".".join(name.split(".")[: number + 1]) for name in found for number in range(name.count(".") + 1)}
    return frozenset(target for name in parts if (target := path_of(name)) is not None)


def closure(start: Path, *, with_lazy: bool) -> set[Path]:
    """Return every file of ours that importing ``start`` reads."""
    seen, queue = {start}, [start]
    while queue:
        new = imports(queue.pop(), with_lazy) - seen
        seen |= new
        queue += new
    return seen


def prose(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the docstrings and comments of files."""
    for path in paths:
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node.value.value
        with open(path, "rb") as file:
            yield from (token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT)


def translated(texts: Iterable[str]) -> str:
    """Return the share of translated constructions."""
    text = "\n".join(texts)
    words = max(len(text.split()), 1)
    return f"{1000 * len(TRANSLATED.findall(text)) / words:.1f} per 1,000 words of {words:,}"


def definitions() -> tuple[int, int]:
    """Return the methods of the largest class, and the number of functions that take ``args``."""
    largest = takers = 0
    for path in files(*PACKAGES):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                largest = max(largest, sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in node.body))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                takers += any(name.arg == "args" for name in names)
    return largest, takers


def import_seconds() -> float:
    """Return the shortest of a few imports of the driver in a fresh process; seconds of wall time."""
    times = []
    for _ in range(IMPORT_RUNS):
        start = time.monotonic()
        subprocess.run([sys.executable, "-c", "import train"], cwd=REPO, check=True, timeout=IMPORT_LIMIT_S)
        times.append(time.monotonic() - start)
    return min(times)


def source_gauges(since: str | None) -> Iterator[tuple[str, str]]:
    """Yield the gauges that the source alone tells."""
    ours = files(*PACKAGES)
    yield "core", size(path for path in ours if is_core(path))
    yield "extensions", size(files(*EXTENSIONS))
    yield "slime/ and slime_plugins/", size(ours)
    yield "tests", size(files("tests"))
    pages = [*(REPO / "docs").rglob("*.md"), *REPO.glob("*.md")]
    yield "words of pages", f"{sum(len(source(path).split()) for path in pages):,}"
    driver = REPO / "train.py"
    yield "driver, by top-level imports", size(closure(driver, with_lazy=False))
    yield "driver, with lazy imports", size(closure(driver, with_lazy=True))
    yield "driver, wall time of its imports", f"{import_seconds():.1f} s"
    largest, takers = definitions()
    yield "methods of the largest class", str(largest)
    yield "functions that take args", str(takers)
    yield "translated constructions in code", translated(prose([*ours, *files("tools")]))
    if since:
        words = ["git", "log", "--format=%s", f"{since}..HEAD"]
        subjects = subprocess.run(words, cwd=REPO, check=True, capture_output=True, text=True).stdout
        yield f"and in commit subjects since {since}", translated([subjects])


@dataclass
class Recorded:
    """What all processes of a job imported and ran."""

    modules: set[Path] = field(default_factory=set)
    driver: set[Path] = field(default_factory=set)
    lines: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    entered: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """File -> ticks in which one of its functions was entered."""
    windows: dict[str, list[list[int]]] = field(default_factory=lambda: defaultdict(list))
    """Step of the driver -> begin and end of each, in ticks."""

    def read(self, folder: Path) -> None:
        """Add what the recorders of a job wrote."""
        for log in folder.iterdir():
            is_driver = False
            for line in log.read_text(errors="replace").splitlines():
                kind, *words = line.split(" ")
                if kind == "D":
                    is_driver = any(word.endswith("train.py") for word in words)
                elif kind == "M" and (path := path_of(words[0])) is not None:
                    self.modules.add(path)
                    if is_driver:
                        self.driver.add(path)
                elif kind == "L" and len(words) == 2:
                    self.lines[words[0]].add(int(words[1]))
                elif kind == "F" and len(words) == 2:
                    self.entered[words[0]].add(int(words[1]))
                elif kind == "B":
                    self.windows[words[0]].append([int(words[1])])
                elif kind == "E":
                    self.windows[words[0]][-1].append(int(words[1]))

    def files_in(self, *steps: str) -> list[str]:
        """Return the files that were entered in the second one of each of these steps, by any process."""
        spans = [self.windows[step][1] for step in steps]
        return sorted(
            name
            for name, ticks in self.entered.items()
            if any(begin <= tick <= end for begin, end in spans for tick in ticks)
        )


def executable_lines(path: Path) -> set[int]:
    """Return the lines of a file's functions that can run."""
    lines: set[int] = set()
    codes = [
        constant for constant in compile(source(path), str(path), "exec").co_consts if hasattr(constant, "co_code")
    ]
    while codes:
        code = codes.pop()
        lines |= {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
        codes += [constant for constant in code.co_consts if hasattr(constant, "co_code")]
    return lines


def record(names: Sequence[str], more: Sequence[str]) -> dict[str, Recorded]:
    """Run golden jobs under the recorder; return what each imported and ran."""
    from tests.e2e.job import make_task
    from tests.golden.jobs import run

    # PYTHONPATH belongs to the job.  Two gauges may run at once: each has its own file.
    pth = Path(site.getsitepackages()[0], f"slime_gauges_{os.getpid()}.pth")
    found = {}
    with tempfile.TemporaryDirectory(prefix="gauges-") as folder:
        base = Path(folder)
        make_task(base)
        pth.write_text(
            f"import os, sys; os.environ.get('SLIME_GAUGES_PTH') == {pth.name!r} and ("
            "sys.path.append(os.environ['SLIME_GAUGES_ROOT']), "
            "__import__('scripts.gauges_recorder', fromlist=['start']).start())\n"
        )
        try:
            for name in names:
                (base / f"recorded-{name}").mkdir()
                where = {"SLIME_GAUGES": str(base / f"recorded-{name}"), "SLIME_GAUGES_ROOT": str(REPO)}
                run(name, base, *more, SLIME_GAUGES_PTH=pth.name, **where)
                found[name] = Recorded()
                found[name].read(base / f"recorded-{name}")
        finally:
            pth.unlink(missing_ok=True)
    return found


def job_gauges(names: Sequence[str], more: Sequence[str], *, lists: bool) -> Iterator[tuple[str, str]]:
    """Yield the gauges of real jobs."""
    jobs = record(names, more)
    for name, job in jobs.items():
        yield f"{name}: imported by all processes", size(job.modules)
        yield f"{name}: imported by the driver", size(job.driver)
        if lists:
            largest = sorted(job.driver, key=lambda path: -num_lines([path]))
            rows = (f"{num_lines([path]):4} {path.relative_to(REPO)}" for path in largest)
            yield f"{name}: by the driver", "\n  ".join(["", *rows])
        if all(len(job.windows[step]) > 1 for step in ("generate", "train", "push_weights")):
            sample, push = job.files_in("generate", "train"), job.files_in("push_weights")
            yield f"{name}: files entered by a rollout and its step", str(len(sample))
            yield f"{name}: files entered by a push", str(len(push))
            if lists:
                yield f"{name}: by a rollout and its step", "\n  ".join(["", *sample])
                yield f"{name}: by a push", "\n  ".join(["", *push])
    core = {path: executable_lines(path) for path in files("slime") if is_core(path)}
    ran = {path: {line for job in jobs.values() for line in job.lines[str(path.relative_to(REPO))]} for path in core}
    num_ran, num_all = (sum(len(core[path] & lines[path]) for path in core) for lines in (ran, core))
    yield f"lines of the core's functions that ran ({', '.join(jobs)})", f"{num_ran / num_all:.0%} of {num_all:,}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="*", default=[], metavar="NAME", help="golden jobs to run and record")
    parser.add_argument("--flags", default="", help="more flags for these jobs, in one word")
    parser.add_argument(
        "--list", action="store_true", help="name the files that the driver imports, and a rollout and a push enter"
    )
    parser.add_argument("--since", metavar="COMMIT", help="commit subjects from here on are read, too")
    options = parser.parse_args()
    for name, value in source_gauges(options.since):
        print(f"{name:52} {value}", flush=True)
    if options.jobs:
        os.chdir(REPO)
        for name, value in job_gauges(options.jobs, options.flags.split(), lists=options.list):
            print(f"{name:52} {value}", flush=True)


if __name__ == "__main__":
    main()
