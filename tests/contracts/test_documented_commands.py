"""The commands on the pages: the program exists, and its parser accepts the arguments."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

from slime.__main__ import VERBS
from tests.contracts.source_tree import REPO

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
PAGES += [REPO / "benchmarks/README.md", *sorted((REPO / "examples").glob("**/*.md"))]
COMMAND = re.compile(rf"\b(?:(?:python3?|pytest|torchrun|make) |slime (?:{'|'.join(VERBS)})\b)[^`\n]*")
OF_TRAINING = {"train.py", "train_async.py"}
"""Programs whose flags ``test_pages.py`` checks."""
PASSES_ON = {"tools/plan.py"}
"""Programs that pass unknown words on to train.py."""


class ParserSeen(BaseException):
    """Raised instead of parsing, with the parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def text_of(page: Path) -> str:
    """The page with each multi-line command joined into one line."""
    return re.sub(r" *\\\n *", " ", page.read_text(encoding="utf-8"))


def commands() -> list[tuple[str, str, list[str]]]:
    """(page, program, arguments) of every python, pytest, torchrun, make and slime command."""
    found = []
    for page in PAGES:
        for line in COMMAND.findall(text_of(page)):
            command = re.split(r"\s#\s|\s{3,}|\.\.\.|\|", line)[0].strip().rstrip(".,;:)")
            try:
                words = shlex.split(command)
            except ValueError:  # an apostrophe in prose
                words = command.split()
            found.append((str(page.relative_to(REPO)), words))
    return [(page, *split(words)) for page, words in found if len(words) > 1]


def split(words: list[str]) -> tuple[str, list[str]]:
    """The program and its arguments; ``make X`` and ``pytest`` are also programs."""
    first, rest = words[0], words[1:]
    if first == "slime":
        verb, *rest = rest
        if verb == "convert" and rest:
            return f"tools/convert_{rest[0]}.py", rest[1:]
        program = VERBS.get(verb, ("", ""))[0]  # in a list of verbs a comma follows
        return ("train.py", rest) if verb == "train" else (program or "slime", rest)
    if first in ("make", "pytest"):
        return first, rest
    if first == "torchrun":
        start = next((i for i, word in enumerate(rest) if word.endswith(".py")), None)
        return ("torchrun", []) if start is None else (rest[start], rest[start + 1 :])
    return (rest[1], rest[2:]) if rest[0] == "-m" and len(rest) > 1 else (rest[0], rest[1:])


def path_of(program: str) -> Path | None:
    """The file of ``tools/x.py`` or ``tests.x``; None if the program is not ours."""
    if program.endswith(".py"):
        return REPO / program
    if not re.fullmatch(r"(?:tests|benchmarks|slime|slime_plugins|examples)(?:\.\w+)+", program):
        return None
    path = REPO / program.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def parser_of(program: str) -> argparse.ArgumentParser:
    """The parser that the program builds, from running it up to that point."""
    path = path_of(program)
    assert path is not None and path.is_file()
    patch = pytest.MonkeyPatch()
    try:

        def stop(self, *args, **kwargs):
            raise ParserSeen(self)

        patch.setattr(argparse.ArgumentParser, "parse_known_args", stop)  # parse_args calls it
        patch.setattr(sys, "argv", [str(path)])
        patch.setattr(sys, "path", [str(REPO), *sys.path])
        runpy.run_path(str(path), run_name="__main__")
    except ParserSeen as seen:
        return seen.parser
    finally:
        patch.undo()
    raise AssertionError(f"{program} reads no command line")


COMMANDS = commands()
PROGRAMS = sorted({program for _, program, _ in COMMANDS if path_of(program) is not None})


def test_commands_are_found():
    assert {"tools/plan.py", "tests.matrix", "tests.e2e.algorithms", "make", "pytest"} <= {c[1] for c in COMMANDS}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_pages_name_exists_and_takes_what_they_say(program):
    path = path_of(program)
    assert path is not None and path.is_file()
    source = path.read_text(encoding="utf-8")
    assert "__main__" in source or program in OF_TRAINING or path.name == "__main__.py"
    if program in OF_TRAINING:
        return
    parser = parser_of(program)
    for action in parser._actions:
        action.required = False
    for group in parser._mutually_exclusive_groups:
        group.required = False
    for page, _, words in [command for command in COMMANDS if command[1] == program]:
        own = words[: words.index("--")] if "--" in words else words
        own = [word for word in own if word not in ("-h", "--help")]
        try:
            _, unknown = parser.parse_known_args(own)
        except SystemExit:
            pytest.fail(f"{page}: {program} {shlex.join(own)}")
        if program not in PASSES_ON:
            assert [word for word in unknown if word.startswith("-")] == [], page


def test_the_targets_that_pages_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), flags=re.MULTILINE))
    named = {words[0] for _, program, words in COMMANDS if program == "make"}
    code = {word for page in PAGES for word in re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8"))}
    assert code <= targets
    assert named & targets >= {"demo", "test"}


def test_the_tests_that_pages_name_exist():
    named = {
        word for _, program, words in COMMANDS if program == "pytest" for word in words if word.startswith("tests")
    }
    assert sorted(name for name in named if not (REPO / name.split("::")[0].rstrip(".,")).exists()) == []


@pytest.mark.parametrize(
    "tool", sorted(str(path.relative_to(REPO)) for path in REPO.glob("tools/*.py") if "__main__" in path.read_text())
)
def test_a_tool_explains_itself(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [tool, "--help"])
    monkeypatch.setattr(sys, "path", [str(REPO), *sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(REPO / tool), run_name="__main__")
    assert end.value.code in (0, None)
    names = Path(tool).name, f"slime {Path(tool).stem}"
    assert capsys.readouterr().out.startswith(tuple(f"usage: {name}" for name in names))


WRONG_FILES = {
    "tools/plan.py": ("--lengths README.md scripts/run-qwen3-4B.sh", "--lengths README.md cannot be read"),
    "tools/trace_timeline_viewer.py": ("README.md", "is cut or damaged"),
    "tools/analyze_profile.py": ("--profile-dir docs", "docs holds no *.json"),
    "tools/ledger.py": ("docs", "docs holds no ledger"),
    "tools/convert_hf_to_fp8.py": ("--model-dir docs --save-dir none", "docs"),
    "tools/fp8_cast_bf16.py": ("--input-fp8-hf-path docs --output-bf16-hf-path none", "docs"),
    "examples/tiny_arithmetic/summary.py": ("docs", "docs has no metrics.jsonl"),
    "examples/tiny_arithmetic/hf_accuracy.py": ("--hf docs --data none", "there is no file docs/config.json"),
    "examples/search-r1/local_search_server.py": ("--corpus none", "--corpus none is no file"),
}


@pytest.mark.parametrize("program", WRONG_FILES)
def test_a_wrong_file_is_named_with_code_2(program, monkeypatch, capsys):
    words, says = WRONG_FILES[program]
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(sys, "argv", [program, *words.split()])
    monkeypatch.setattr(sys, "path", [str(REPO), *sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(REPO / program), run_name="__main__")
    assert end.value.code == 2
    assert says in capsys.readouterr().err
