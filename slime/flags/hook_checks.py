"""Checks that plug-ins can be imported and called as their protocols require.

Plug-ins of the rollout side are imported and checked on the driver, before anything starts.  Those of the trainer may
need a GPU to import, so the driver only reads their source (``check_source``), and the trainer's processes import and
check them (``check_trainer_hooks``).
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slime.flags.config import BackendFlags
from slime.flags.hooks import HOOKS, Hook
from slime.flags.reward import RewardConfig
from slime.utils.errors import HookError, did_you_mean
from slime.utils.plugins import IMPORT_TIMEOUT_S, import_plugin, is_coroutine_function, said_by

DATA_SOURCE_METHODS = ("get_samples", "add_samples", "save", "load", "__len__")
OF_EVAL_DATASET = ("--custom-rm-path", "--custom-generate-function-path")
"""Plug-ins that an entry of --eval-config may set for its data set."""


def check_hooks_on_driver(args: Namespace) -> None:
    """Check every plug-in named in ``args`` as far as the driver can.

    A plug-in of the rollout side may have an attribute ``check_args``: a function that raises ConfigError if the
    plug-in does not work with the run's flags.

    Raises:
        HookError: names the flag, its value, the call and the problem.
    """
    own = {(hook.flag, hook.default) for hook in HOOKS} | {("--eval-function-path", HOOKS[0].default)}
    for hook, path, where in named_hooks(args):
        if (where, path) in own:
            continue  # slime's own, imported elsewhere in every run
        if hook.side == "rollout":
            target = check_import(hook, path, where, timeout_s=args.plugin_import_timeout_s)
            if hasattr(target, "check_args") and args.runs_here:
                target.check_args(args)
            if hook.flag == "--custom-rm-path" and not RewardConfig.of(args).takes_any_reward:
                check_returns_reward(path, where, target)
        else:
            check_source(hook, path, where)
    check_spec_source(BackendFlags.of(args).spec)


def check_spec_source(spec: list[str] | None) -> None:
    """Check that the module and the name of Megatron's ``--spec MODULE FUNC`` exist, by reading the source.

    Raises:
        HookError: one of them does not.
    """
    if not spec:
        return
    tree = _source_of(spec[0], " ".join(spec), "--spec")
    if tree is not None and not {name for name, _ in _top_level(tree)} & {spec[1], "*", "__getattr__"}:
        raise HookError(f"--spec: {spec[0]} has no {spec[1]}. Correct the second word.")


def check_trainer_hooks(args: Namespace) -> None:
    """Import and check every plug-in of the trainer.  Called in a trainer process.

    Raises:
        HookError: names the flag, its value, the call and the problem.
    """
    for hook, path, where in named_hooks(args):
        if hook.side == "trainer":
            check_import(hook, path, where, timeout_s=args.plugin_import_timeout_s)


def named_hooks(args: Namespace) -> Iterator[tuple[Hook, str, str]]:
    """Yield (hook, import path, where it is named) for every plug-in in ``args``, including those of eval data."""
    for hook in HOOKS:
        value = getattr(args, hook.dest)
        for path in [value] if isinstance(value, str) else value or []:
            yield hook, path, hook.flag
    for dataset in args.eval_datasets:
        for hook in HOOKS:
            path = getattr(dataset, hook.dest, None) if hook.flag in OF_EVAL_DATASET else None
            if path is not None and path != getattr(args, hook.dest):
                yield hook, path, f"{hook.dest} of eval data set {dataset.name}"


def check_import(hook: Hook, path: str, where: str, *, timeout_s: float = IMPORT_TIMEOUT_S) -> Any:
    """Import the plug-in ``path``, check it against the protocol of ``hook``, and return it."""
    module_name, attribute = split_path(path, where)
    module = import_plugin(module_name, f"{where}: {path}", timeout_s)
    try:
        target = getattr(module, attribute)
    except AttributeError:
        raise HookError(_has_no(f"{where}: {module_name} ({module.__file__})", attribute, dir(module), path)) from None
    except Exception as error:  # raised by the module's __getattr__
        raise HookError(
            f"{where}: {module_name} raised {said_by(error)} when it was asked for {attribute}."
        ) from error
    _check_kind(hook, path, where, target)
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return target  # builtins have no signature
    check_signature(hook, path, where, signature)
    return target


def check_returns_reward(path: str, where: str, target: Any) -> None:
    """Check in the source of a reward function that it can return a reward.

    The function is not called: a reward may cost money, need a server, or count its calls.

    Raises:
        HookError: it returns nothing but None or text.
    """
    if not inspect.isfunction(target) or inspect.unwrap(target) is not target:
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(target)))
    except (OSError, SyntaxError):
        return  # it has no source of its own, as a lambda or a generated function
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    inside = list(_own_nodes(function))
    returned = [_kinds_of(node.value) for node in inside if isinstance(node, ast.Return)]
    if not returned and isinstance(function.body[-1], ast.Raise | ast.While):
        return  # it never returns
    kinds = set[str]().union(*returned) or {"None"}
    if kinds <= {"None", "str"} and not any(isinstance(node, ast.Yield | ast.YieldFrom) for node in inside):
        raise HookError(
            f"{where}: {path} returns {' and '.join(sorted(kinds))} only; it must return a number, or a dict whose "
            f"entry --reward-key names. Correct it, and try it with `slime check {path}`."
        )


def _own_nodes(parent: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below ``parent`` without those of functions and classes inside it."""
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield node
            yield from _own_nodes(node)


def _kinds_of(value: ast.expr | None) -> set[str]:
    """Return ``None``, ``str`` or ``other`` for what an expression may give."""
    match value:
        case None | ast.Constant(value=None):
            return {"None"}
        case ast.JoinedStr() | ast.Constant(value=str()):
            return {"str"}
        case ast.IfExp():
            return _kinds_of(value.body) | _kinds_of(value.orelse)
        case _:
            return {"other"}


def _has_no(module: str, attribute: str, names: Iterable[str], path: str) -> str:
    """Return what is wrong with a path into ``module``, with the name there that is most like ``attribute``."""
    return f"{module} has no {attribute}.{did_you_mean(attribute, names)} Correct the path {path}."


def check_source(hook: Hook, path: str, where: str) -> None:
    """Check ``path`` by reading its module's source; properties that only running it would show are not checked."""
    module_name, attribute = split_path(path, where)
    tree = _source_of(module_name, path, where)
    if tree is None:
        return
    bindings = list(_top_level(tree))
    found = [node for name, node in bindings if name == attribute]
    if not found:
        if any(name in ("*", "__getattr__") for name, _ in bindings):
            return
        raise HookError(_has_no(f"{where}: {module_name}", attribute, [name for name, _ in bindings], path))
    node = found[-1]
    if isinstance(node, ast.AsyncFunctionDef) and not node.decorator_list and hook.kind == "sync":
        raise HookError(_must_not_be_async(hook, path, where))
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:
        check_signature(hook, path, where, signature_of(node.args))


def split_path(path: str, where: str) -> tuple[str, str]:
    """Return the module and the attribute of an import path.

    Raises:
        HookError: it has no dot, or is written as a file or with a colon.
    """
    module_name, dot, attribute = path.rpartition(".")
    if not dot or ":" in path or "/" in path or not all(part.isidentifier() for part in path.split(".")):
        raise HookError(
            f"{where} is {path!r}; a plug-in is named package.module.attribute, with dots only, "
            "as in slime.rollout.sglang_rollout.generate_rollout."
        )
    return module_name, attribute


def check_signature(hook: Hook, path: str, where: str, signature: inspect.Signature) -> None:
    """Check that ``signature`` accepts the call that ``hook.protocol`` describes."""
    positional, keywords = call_of(hook, signature)
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        shown = ", ".join([*positional, *(f"{name}=..." for name in keywords)])
        parameters = ", ".join(str(p).split(":")[0].split("=")[0].strip() for p in signature.parameters.values())
        raise HookError(
            f"{where}: {path}({parameters}) cannot be called as ({shown}): {error}. "
            f"See {hook.protocol.__name__} in slime/flags/hooks.py."
        ) from error


def call_of(hook: Hook, signature: inspect.Signature) -> tuple[list[str], list[str]]:
    """Return the arguments passed to a plug-in with ``signature``: names of positional and of keyword arguments."""
    contract = list(inspect.signature(hook.protocol.__call__).parameters.values())[1:]
    positional = [p.name for p in contract if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    keywords = [
        p.name
        for p in contract
        if p.kind is inspect.Parameter.KEYWORD_ONLY
        and (p.default is inspect.Parameter.empty or p.name in signature.parameters)
    ]
    return positional, keywords


def signature_of(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature of a parsed function; defaults become None, annotations are dropped."""
    kinds = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    parameters = [
        kinds(
            a.arg,
            kinds.POSITIONAL_ONLY if index < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=None if index >= first_default else kinds.empty,
        )
        for index, a in enumerate(positional)
    ]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _check_kind(hook: Hook, path: str, where: str, target: Any) -> None:
    """Reject objects that are not callable, classes without required methods, and sync functions in place of async
    ones (or vice versa).
    """
    if not callable(target):
        raise HookError(f"{where}: {path} is a {type(target).__name__} and cannot be called.")
    if hook.kind == "class":
        missing = [name for name in DATA_SOURCE_METHODS if not hasattr(target, name)]
        if missing:
            raise HookError(f"{where}: {path} lacks {', '.join(missing)}. See {hook.protocol.__name__} in hooks.py.")
        return
    inner = inspect.unwrap(target)
    is_async = is_coroutine_function(target)
    if hook.kind == "sync" and is_async:
        raise HookError(_must_not_be_async(hook, path, where))
    # A wrapper with another name may return the awaitable of a coroutine function inside it.
    plain = inspect.isfunction(target) and inner is target and target.__name__ == path.rpartition(".")[2]
    if hook.kind == "async" and plain and not is_async:
        raise HookError(
            f"{where}: {path} is a plain function, but its result is awaited. Write it as `async def`. "
            f"See {hook.protocol.__name__} in slime/flags/hooks.py."
        )


def _must_not_be_async(hook: Hook, path: str, where: str) -> str:
    return (
        f"{where}: {path} is an async function, but nobody awaits it. Write it as `def`. "
        f"See {hook.protocol.__name__} in slime/flags/hooks.py."
    )


def _source_of(module_name: str, path: str, where: str) -> ast.Module | None:
    """Return the syntax tree of a module; None if it has no source (a compiled module).

    Raises:
        HookError: there is no such module, or its source is not valid Python.
    """
    if package := module_name.rpartition(".")[0]:
        import_plugin(package, f"{where}: {path}")  # find_spec would import it without a deadline
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise HookError(f"{where}: {module_name} of {path} cannot be found: {error}.") from error
    if spec is None:
        raise HookError(
            f"{where}: there is no module {module_name}, named by {path}. "
            "The path is package.module.attribute, importable from here and in Ray's workers (PYTHONPATH)."
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except (SyntaxError, ValueError) as error:
        raise HookError(f"{where}: {module_name} of {path} is no Python: {said_by(error)}. Correct it.") from error


def _top_level(parent: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield every (name, node that binds it) of a module, at any depth outside functions and classes."""
    for node in ast.iter_child_nodes(parent):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    yield (alias.asname or alias.name).split(".")[0], node
            case ast.Name(ctx=ast.Store()):
                yield node.id, node
            case ast.expr() if not isinstance(node, ast.Tuple | ast.List | ast.Starred):
                continue  # expressions rarely bind a plug-in, and a long sum is deeply nested
            case _:
                yield from _top_level(node)
