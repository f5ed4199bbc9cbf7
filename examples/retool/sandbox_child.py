"""The process in which a program runs: limits, a short list of names, then the program from stdin.

It prints one JSON object, ``{"output": what was printed, "error": one line, or ""}``.  Only the standard library is
used, and nothing of this project: it is started with ``-I -S``.
"""

import ast
import builtins
import importlib
import io
import json
import resource
import sys
import types

MODULES = (
    *("math", "cmath", "fractions", "decimal", "statistics", "random", "itertools", "functools", "collections"),
    *("heapq", "bisect", "re", "datetime", "string", "json"),
)
"""The modules that may be imported; of each only its public names that are not modules themselves."""

NO_BUILTINS = (
    *("open", "eval", "exec", "compile", "input", "breakpoint", "help", "exit", "quit", "memoryview"),
    *("getattr", "setattr", "delattr", "hasattr", "vars", "globals", "locals", "dir"),
)
"""Files, code from text, and ways to reach an attribute whose name the check below does not see."""

NO_NAMES = ("Formatter", "SystemRandom", "namedtuple", "singledispatch", "singledispatchmethod", "scanner")
"""Public names that take attribute names as text, or compile code."""

FRAMES = ("gi_", "cr_", "ag_", "tb_", "f_", "co_")
"""Beginnings of attributes that lead to the frames of the interpreter."""


class OutputFull(BaseException):
    """The program printed more than anybody will read.  Not an Exception: the program cannot catch it by that."""


class Output(io.StringIO):
    """Text up to a limit."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def write(self, text):
        written = super().write(text[: max(self.limit - self.tell(), 0)])
        if self.tell() >= self.limit:
            raise OutputFull
        return written


def set_limits(limits):
    seconds = max(1, int(limits["time_s"] + 0.999))
    memory = limits["memory_mib"] << 20
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))


def public_part(name):
    """A module with the public names of another one, so that ``fractions.sys`` and its like are out of reach."""
    whole = importlib.import_module(name)
    part = types.ModuleType(name)
    for key, value in vars(whole).items():
        if not key.startswith("_") and key not in NO_NAMES and not isinstance(value, types.ModuleType):
            setattr(part, key, value)
    return part


def guarded_import(name, globals=None, locals=None, fromlist=(), level=0):
    if level or name not in MODULES:
        raise ImportError(f"{name} is not allowed; these are: {', '.join(MODULES)}")
    return public_part(name)


def check(tree):
    """Refuse what would walk from an object to the interpreter behind it.  Methods such as __add__ may be defined."""
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in ("__name__", "__init__"):
            continue
        hidden = "_" if isinstance(node, ast.Attribute) else "__"
        if name.startswith(hidden) or (isinstance(node, ast.Attribute) and name.startswith(FRAMES)):
            raise SyntaxError(f"the name {name} is not allowed")


def run(program):
    """Run it; the error as one line, empty when there was none."""
    allowed = {key: value for key, value in vars(builtins).items() if key not in NO_BUILTINS}
    allowed["__import__"] = guarded_import
    try:
        tree = ast.parse(program, "program")
        check(tree)
        exec(compile(tree, "program", "exec"), {"__builtins__": allowed, "__name__": "__main__"})
    except OutputFull:
        return "error: the output is too long"
    except SystemExit:
        return ""
    except BaseException as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ""


def main():
    limits = json.loads(sys.argv[1])
    program = sys.stdin.read()
    for name in MODULES:  # reading module files is our business, not the program's
        importlib.import_module(name)
    set_limits(limits)
    stdout, sys.stdout = sys.stdout, Output(limits["output_characters"] + 1)
    error = run(program)
    printed, sys.stdout = sys.stdout, stdout
    stdout.write(json.dumps({"output": printed.getvalue(), "error": error}))
    stdout.flush()


if __name__ == "__main__":
    main()
