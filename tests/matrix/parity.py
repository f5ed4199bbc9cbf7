"""In one process: the trainer's model against the reference, and the checkpoint in both directions.

Every check returns one :class:`Cell` with the worst number it found and its tensor.
"""

from __future__ import annotations

import math
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slime.backends.megatron_utils import cpu_platform  # noqa: F401

# isort: split
from megatron.core import mpu

from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
from slime.backends.megatron_utils.model import build_optimizer
from slime.weights.named_tensors import config_dtype
from tests.matrix import trainer
from tests.matrix.batch import make_train_data, reference_loss
from tests.matrix.case import (
    FamilyCase,
    gradients_by_checkpoint_name,
    load_cases,
    read_config,
    read_tensors,
    write_bf16_copy,
)
from tests.matrix.comparisons import differing_tensors, gradient_errors
from tests.matrix.pool import RankError, RankPool
from tests.matrix.report import CHECKS, Cell

LOG_PROB_BOUND = 2e-5
"""Largest difference of a log-prob, absolute."""
GRADIENT_BOUND = 1e-4
"""Largest relative difference of a parameter's gradient, see ``comparisons.gradient_errors``."""


@contextmanager
def one_process_world() -> Iterator[None]:
    """A default process group of one rank, without parallel groups; both are destroyed at the end."""
    leave_world()  # the world of an earlier test in this process
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", world_size=1, rank=0)
        try:
            yield
        finally:
            leave_world()


def leave_world() -> None:
    """Destroy the parallel groups and the default group, if they exist."""
    if mpu.is_initialized():
        mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


Outcome = tuple[float, float, str]
"""Measured, bound, detail."""


class FamilyRun:
    """The checks of one family on one checkpoint, each tried once whatever happened to the others."""

    keeps_world = False
    """Whether models share a world of one rank, because destroying its groups takes longer than a step."""
    _world = ExitStack()
    """The shared world; a process has one."""

    def __init__(self, case: FamilyCase, folder: Path) -> None:
        """Write the checkpoint, and its copy in bf16."""
        self.case = case
        self.folder, self.bf16_folder = folder / "hf", folder / "hf_bf16"
        self.work = folder
        case.write_checkpoint(self.folder)
        write_bf16_copy(self.folder, self.bf16_folder)
        self.data = make_train_data(case.vocab_size, add_images=case.add_images)

    def cells(self, checks: tuple[str, ...]) -> list[Cell]:
        """One cell per check, in order."""
        steps: dict[str, Callable[[], Outcome]] = {
            "log-probs": self.log_probs,
            "gradients": self.gradients,
            "step": self.step,
            "round trip": lambda: self.round_trip(self.folder),
            "round trip bf16": lambda: self.round_trip(self.bf16_folder),
            "live export": lambda: self.live_export(self.folder),
            "live export bf16": lambda: self.live_export(self.bf16_folder, "--bf16"),
        }
        return [run_check(self.case.name, check, steps[check]) for check in checks]

    def log_probs(self) -> Outcome:
        """Every response token's log-prob, against the reference's."""
        expected = torch.cat(self.reference()[1])
        assert expected.std() > 0.5, "the weights are too small to tell errors apart"
        with self.model() as (args, model):
            data = trainer.prepare(args, self.data)
            mine = dict(zip(data["partition"], trainer.response_log_probs(args, model, data), strict=True))
        actual = torch.cat([mine[index] for index in range(len(mine))]).cpu()
        difference = (actual - expected).abs()
        worst = int(difference.argmax())
        return float(difference[worst]), LOG_PROB_BOUND, f"response token {worst} of {len(difference)}"

    def gradients(self) -> Outcome:
        """Every parameter's gradient, against the reference's, through the trainer's own loss."""
        loss, _, expected = self.reference()
        with self.model() as (args, model):
            reports = trainer.run_backward(args, model, trainer.prepare(args, self.data))
            actual = trainer.model_gradients(args, model)
        reported = sum(float(report["values"][1]) for report in reports) / len(set(self.data["rollout_ids"]))
        if self.case.extra_loss is None:
            assert abs(reported - loss) <= 1e-5 * abs(loss), f"the loss is {reported}; the reference's is {loss}"
        errors = gradient_errors(actual, expected)
        worst = max(errors, key=lambda name: errors[name])
        without = sum(not tensor.any() for tensor in expected.values())
        return errors[worst], GRADIENT_BOUND, f"{worst} of {len(errors)} tensors, {without} without gradient"

    def step(self) -> Outcome:
        """Log-probs after an optimizer step, against the reference with the weights that ``--save-hf`` exports."""
        trained = self.work / "trained"
        with self.model() as (args, model):
            optimizer = build_optimizer(Namespace(**{**vars(args), "use_distributed_optimizer": False}), model)
            data = trainer.prepare(args, self.data)
            trainer.run_backward(args, model, data)
            is_applied, _, _ = optimizer.step()
            assert is_applied, "the optimizer took no step"
            mine = dict(zip(data["partition"], trainer.response_log_probs(args, model, data), strict=True))
            save_hf_model_to_path(args, trained, model)
        _, before, _ = self.reference()
        _, expected = reference_loss(self.case, self.case.load_reference(trained), self.data)
        actual = torch.cat([mine[index] for index in range(len(mine))]).cpu()
        moved = float((actual - torch.cat(before)).abs().max())
        assert moved > 100 * LOG_PROB_BOUND, f"the step moved the log-probs by {moved} at most"
        return float((actual - torch.cat(expected)).abs().max()), LOG_PROB_BOUND, f"moved by {moved:.2g}"

    def reference(self) -> tuple[float, list[Tensor], dict[str, Tensor]]:
        """Loss, log-probs and gradients of the plain model; computed once."""
        if not hasattr(self, "_reference"):
            model = self.case.load_reference(self.folder)
            loss, log_probs = reference_loss(self.case, model, self.data)
            loss.backward()
            self._reference = (float(loss.detach()), log_probs, gradients_by_checkpoint_name(model))
        return self._reference

    @contextmanager
    def model(self, folder: Path | None = None, *flags: object) -> Iterator[tuple[Namespace, list[torch.nn.Module]]]:
        """The trainer's args, and its model with the checkpoint's weights."""
        with ExitStack() as own:
            if not (self.keeps_world and dist.is_initialized()):
                (self._world if self.keeps_world else own).enter_context(one_process_world())
            args = trainer.make_args(self.case, folder or self.folder, *flags)
            initialize.init(args)
            yield args, trainer.load_model(args)

    def round_trip(self, source: Path) -> Outcome:
        """Hugging Face to torch_dist and back, with the command-line tools' own functions."""
        from tools import convert_hf_to_torch_dist, convert_torch_dist_to_hf

        self._world.close()  # the tool creates its own
        saved, back = self.work / f"{source.name}_dist", self.work / f"{source.name}_back"
        argv = [*self.case.flags(source), "--hf-checkpoint", str(source), "--save", str(saved)]
        try:
            convert_hf_to_torch_dist.convert(convert_hf_to_torch_dist.parse(argv))
        finally:
            leave_world()
        argv = ["--input-dir", str(saved / "release"), "--output-dir", str(back), "--origin-hf-dir", str(source)]
        convert_torch_dist_to_hf.convert(convert_torch_dist_to_hf.parse(argv))
        return self._compared(read_tensors(back), read_tensors(source))

    def live_export(self, source: Path, *flags: object) -> Outcome:
        """The tensors of a weight push, in the dtype that the engines hold."""
        with self.model(source, *flags) as (args, model):
            dtype = config_dtype(read_config(source))
            exported = {name: tensor.to("cpu", copy=True) for name, tensor in trainer.export(args, model, dtype=dtype)}
        return self._compared(exported, self.case.read_pushed(source))

    def _compared(self, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Outcome:
        problems = differing_tensors(actual, expected)
        shown = "; ".join(problems[:4]) or f"{len(expected)} tensors"
        return float(len(problems)), 0.0, shown


def run_check(family: str, column: str, check: Callable[[], Outcome], kind: str = "check") -> Cell:
    """The cell of one check; an exception becomes a failure that says where."""
    start = time.monotonic()
    try:
        measured, bound, detail = check()
    except Exception as error:  # noqa: BLE001 - one family's failure must not hide another's numbers
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:600]
        detail = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {text}"
        measured, bound = math.nan, 0.0
    return Cell(family, column, measured, bound, detail, time.monotonic() - start, kind)


def check_family(case: FamilyCase, checks: tuple[str, ...] = CHECKS) -> list[Cell]:
    """All one-process cells of a family, in a separate folder."""
    with tempfile.TemporaryDirectory(prefix=f"matrix-{case.name}-") as folder:
        try:
            run = FamilyRun(case, Path(folder))
        except Exception as error:  # noqa: BLE001
            text = f"cannot write the checkpoint: {type(error).__name__}: {error}"
            return [Cell(case.name, check, math.nan, 0.0, text) for check in checks]
        run.keeps_world = True
        with run._world:
            return run.cells(checks)


def check_families(names: Sequence[str], checks: Sequence[str]) -> Iterator[Cell]:
    """The one-process cells of the named families, each in its own process, which may abort or hang alone."""
    with RankPool() as pool:
        for name in names:
            try:
                (cells,) = pool.run(_check_alone, 1, name, tuple(checks), timeout_s=240, joins_world=False)
            except RankError as error:
                text = " ".join(str(error).split())[-600:]
                cells = [Cell(name, check, math.nan, 0.0, text) for check in checks]
            yield from cells


def _check_alone(rank: int, world_size: int, name: str, checks: tuple[str, ...]) -> list[Cell]:
    return check_family(load_cases([name])[name], checks)
