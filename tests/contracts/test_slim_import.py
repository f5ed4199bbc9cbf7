"""Layers 0 to 3 and the flags import without Ray, Megatron, SGLang, trackers or a GPU; the driver imports no code of
other processes.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scripts.gauges import closure, path_of
from slime.weights.family_files import family_files
from tests.contracts.source_tree import REPO

PROGRAM = """
import importlib, importlib.abc, json, os, pkgutil, sys, tempfile, traceback

BLOCKED = ("ray", "megatron", "sglang", "sglang_router", "wandb", "tensorboard", "transformer_engine", "sgl_kernel")

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked in this test")

def import_all(package):
    package = importlib.import_module(package)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        if module.name not in needs_more:
            importlib.import_module(module.name)
    loaded = sorted({name.split(".")[0] for name in sys.modules} & set(BLOCKED))
    assert not loaded, loaded

sys.meta_path.insert(0, Blocker())
packages, needs_more = map(json.loads, sys.argv[1:])
import torch, transformers, pyarrow.parquet  # once for all: none of slime's modules is imported here
errors = {}
for package in packages:
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            try:
                import_all(package)
                os._exit(0)
            except BaseException:
                said.write(traceback.format_exc())
                said.flush()
                os._exit(1)
        code = os.waitpid(child, 0)[1]
        said.seek(0)
        errors[package] = said.read() or (f"it ended with {code}" if code else "")
print(json.dumps(errors))
"""

PACKAGES = (
    "slime.utils",
    "slime.algorithms",
    "slime.flags",
    "slime.observability",
    "slime.train_data",
    "slime.weights",
    "slime.agent",
    "slime.backends.train_worker",
    "slime.rollout",
    "slime.arguments",
)
NEEDS_MORE = (
    # CUDA kernels: CUDA builds of torch include Triton, CPU builds do not
    "slime.algorithms.log_probs_kernels",
    "slime.ext.fast_push.kernels.triton_cast",
    "slime.ext.fast_push.kernels.triton_copy",
    "slime.ext.fast_push.kernels.triton_digest",
    "slime.ext.low_precision.triton_int4",
    # old paths of modules that are now in a backend
    "slime.utils.routing_replay",
    "slime.utils.reloadable_process_group",
)


@pytest.fixture(scope="module")
def errors():
    """Package -> its import error, if any; each in a fork of one process that has imported torch."""
    words = [sys.executable, "-c", PROGRAM, json.dumps(PACKAGES), json.dumps(NEEDS_MORE)]
    result = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_alone(package, errors):
    assert errors[package] == ""


DRIVER = (
    *("train", "train_async", "slime.ray.job", "slime.ray.train_loop", "slime.ext.recovery.job"),
    *("slime.backends.megatron_utils.arguments", "slime.backends.sglang_utils.arguments"),
    *("slime.ext.record.run_record", "slime.ext.record.alarms", "slime.ext.record.scraping"),
)
"""Modules with many imports that the driver of a plain run imports, including inside functions."""
WORK_OF_OTHERS = (
    *("slime.backends.train_worker", "slime.backends.megatron_utils.actor", "slime.ext.fast_push.verified_push"),
    *("slime.backends.sglang_utils.sglang_engine", "slime.ray.engines.actor", "slime.ray.engines.fleet"),
    *("slime.ray.rollout_work", "slime.rollout.sglang_rollout", "slime.ext.ledger.ledger"),
    *("slime.ext.record.sample_record", "slime.weights.quantize", "slime.weights.push.engine"),
    *("slime.backends.sglang_utils.server_args", "slime.ext.record.prometheus_page", "slime.utils.http_door"),
    *("slime.utils.http_utils", "slime.utils.processing_utils", "slime.utils.async_utils"),
)


def test_the_driver_imports_no_work_of_other_processes():
    starts = [path_of(module) for module in DRIVER]
    imported = set().union(*(closure(start, with_lazy=False) for start in starts if start is not None))
    work = {path_of(module) for module in WORK_OF_OTHERS}
    assert None not in starts and None not in work
    assert not imported & work


def test_a_program_imports_only_the_backends_that_its_run_has():
    for program in ("train", "train_async"):
        imported = closure(REPO / f"{program}.py", with_lazy=False)
        assert not [path for path in imported if REPO / "slime/backends" in path.parents]


def test_what_families_mend_in_sglang_imports_nothing_of_the_trainer():
    hooks = ["slime.backends.sglang_utils.hooks", *family_files("*/sglang_hooks.py")]
    packages = {".".join(module.split(".")[:end]) for module in hooks for end in range(1, module.count(".") + 1)}
    starts = [path_of(module) for module in (*hooks, *packages)]
    assert len(hooks) > 1 and None not in starts
    imported = set().union(*(closure(start, with_lazy=False) for start in starts if start is not None))
    assert not [path for path in imported if REPO / "slime/backends/megatron_utils" in path.parents]
