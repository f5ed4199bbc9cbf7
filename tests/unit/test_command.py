"""The command ``slime``: each verb starts an existing program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from slime.__main__ import QUICK_HELP, ROOT, VERBS, main


def test_every_verb_has_its_program_and_a_line_of_help(capsys):
    main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in VERBS)
    assert [name for name, (program, _) in VERBS.items() if not (ROOT / program).exists()] == []


def test_a_shell_completes_the_verb_and_after_it_files(capsys):
    main(["--completion"])
    script = capsys.readouterr().out
    for words, wanted in ((("slime", "re"), "report replay"), (("slime", "diff", "r"), "")):
        ask = f'COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _slime; echo "${{COMPREPLY[*]}}"'
        ended = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=30, check=True
        )
        assert ended.stdout.strip() == wanted and ended.stderr == ""


def test_the_installed_distribution_has_this_command(tmp_path):
    checkout, place = tmp_path / "checkout", tmp_path / "venv"
    shutil.copytree(ROOT / "slime", checkout / "slime", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    venv.create(place, symlinks=True)
    packages = place / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    (packages / "around.pth").write_text(sysconfig.get_path("purelib"))  # setuptools, which the build needs
    uv = [Path(sysconfig.get_path("scripts")) / "uv", "pip", "install", "--offline", "--python", place / "bin/python"]
    subprocess.run([*uv, "--no-deps", "--no-build-isolation", "-e", checkout], check=True, timeout=120)
    shown = subprocess.run([place / "bin/slime", "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert all(f"  {name} " in shown.stdout for name in VERBS)


@pytest.mark.parametrize("words", [["trian"], ["convert"], ["convert", "nothing"]])
def test_a_word_that_is_no_verb_is_refused_with_those_that_are(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2 and "use one of" in capsys.readouterr().err


def test_a_verb_hands_its_words_to_the_program(capsys):
    with pytest.raises(SystemExit) as left:
        main(["convert", "hf-to-fp8", "--help"])
    assert left.value.code == 0 and "--model-dir" in capsys.readouterr().out


@pytest.mark.parametrize("verb", QUICK_HELP)
def test_help_of_a_page_names_every_flag_without_importing_its_program(verb, capsys):
    main([verb, "--help"])
    shown, source = capsys.readouterr().out, (ROOT / VERBS[verb][0]).read_text()
    assert f"slime {verb} RUN" in shown
    assert [flag for flag in re.findall(r'add_argument\("(--[a-z-]+)"', source) if flag not in shown] == []


def test_train_becomes_the_driver_and_finds_plug_ins_of_the_folder(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.chdir(tmp_path)
    main(["train", "--async", "run.yaml", "--lr", "1e-6"])
    assert started == [[sys.executable, str(ROOT / "train_async.py"), "run.yaml", "--lr", "1e-6"]]
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(ROOT), str(tmp_path), "elsewhere"]
