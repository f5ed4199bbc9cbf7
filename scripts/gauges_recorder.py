"""What a process runs of our code, written to a file while it runs; :mod:`scripts.gauges` starts it and reads it.

A process that is killed has written all lines before.  Each line of ``$SLIME_GAUGES/PID`` is one of

    D ARGV                       the process
    M MODULE                     a module of ours is imported
    L FILE LINE                  a line ran for the first time
    F FILE TICK                  a function of the file was entered in this hundredth of a second
    B STEP TICK, E STEP TICK     a step of the driver began, ended
"""

from __future__ import annotations

import importlib.abc
import os
import re
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

PACKAGES = ("slime", "slime_plugins")
TICKS_PER_S = 100
STEP = re.compile(r"\w*Job\.(generate|train|push_weights)")
"""The driver's methods that are steps; one that a subclass overrides may call the one above it."""


class Recorder(importlib.abc.MetaPathFinder):
    """Sees every import first, and every call and line of our files."""

    def __init__(self, folder: str, root: str) -> None:
        self._folder = folder
        self._prefixes = tuple(os.path.join(root, name) + os.sep for name in PACKAGES)
        self._root = len(root) + 1
        self._ours: dict[CodeType, str] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._new_lines: dict[CodeType, set[int]] = {}
        """Of each code, the lines that have not run."""
        self._steps: dict[str, FrameType] = {}
        """The steps under way."""
        self._follows_actors = False
        self._open()
        os.register_at_fork(after_in_child=self._open)

    def _open(self) -> None:
        self._file = open(os.path.join(self._folder, str(os.getpid())), "a", buffering=1)  # noqa: SIM115
        self._seen = set()

    def _write(self, *words: Any) -> None:
        if words not in self._seen:
            self._seen.add(words)
            self._file.write(" ".join(map(str, words)) + "\n")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Note an import of ours, and leave it to the finders behind."""
        if fullname.partition(".")[0] in PACKAGES:
            self._write("M", fullname)
            self._follow_actors()
        return None

    def _follow_actors(self) -> None:
        """Trace the methods of actors, too: Ray calls them in threads that ``threading.settrace`` does not reach."""
        ray = sys.modules.get("ray._private.function_manager")
        if ray is None or self._follows_actors:
            return
        self._follows_actors = True
        make = ray.FunctionActorManager._make_actor_method_executor

        def make_traced(manager: Any, name: str, method: Any) -> Any:
            executor = make(manager, name, method)

            def traced(*args: Any, **kwargs: Any) -> Any:
                sys.settrace(self.trace)
                return executor(*args, **kwargs)

            traced.name, traced.method = name, method  # type: ignore[attr-defined]
            return traced

        ray.FunctionActorManager._make_actor_method_executor = make_traced

    def trace(self, frame: FrameType, kind: str, value: Any) -> Any:
        """Follow the frames of our files alone; a function for ``sys.settrace``."""
        code = frame.f_code
        name = self._ours.get(code)
        if name is None:
            path = code.co_filename
            name = self._ours[code] = path[self._root :] if path.startswith(self._prefixes) else ""
        if not name:
            return None
        tick = int(time.monotonic() * TICKS_PER_S)
        self._write("F", name, tick)
        if (step := STEP.fullmatch(code.co_qualname)) and step[1] not in self._steps:
            self._steps[step[1]] = frame
            self._write("B", step[1], tick)
        elif not self._lines_left(code):
            return None
        return self._trace_line

    def _lines_left(self, code: CodeType) -> set[int]:
        if code not in self._new_lines:
            self._new_lines[code] = {line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}
        return self._new_lines[code]

    def _trace_line(self, frame: FrameType, kind: str, value: Any) -> Any:
        code = frame.f_code
        if kind == "line":
            self._write("L", self._ours[code], frame.f_lineno)
            self._lines_left(code).discard(frame.f_lineno)
        elif kind == "return" and (step := STEP.fullmatch(code.co_qualname)) and self._steps.get(step[1]) is frame:
            del self._steps[step[1]]
            self._write("E", step[1], int(time.monotonic() * TICKS_PER_S))
        return self._trace_line


def start() -> None:
    """Record this process, from here to its end."""
    recorder = Recorder(os.environ["SLIME_GAUGES"], os.environ["SLIME_GAUGES_ROOT"])
    recorder._write("D", *(sys.orig_argv[1:4]))
    sys.meta_path.insert(0, recorder)
    threading.settrace(recorder.trace)
    sys.settrace(recorder.trace)
