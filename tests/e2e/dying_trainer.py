"""Hooks before each optimizer step that make a trainer rank fail, once in each named rollout."""

import os
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _is_due(args: Namespace, rollout_id: int, step_id: int, rollouts: tuple[int, ...], rank: int = 0) -> bool:
    """Whether this rank fails now: before the second step, the first time the rollout is trained."""
    mark = Path(args.save) / f"died_in_{rollout_id}"
    if rollout_id not in rollouts or step_id != 1 or dist.get_rank() != rank or mark.exists():
        return False
    mark.touch()
    return True


def the_critic_dies_in_rollout_1_and_the_actor_in_2_and_with_the_copies_in_3(
    args: Namespace, rollout_id: int, step_id: int, *_: Any
) -> None:
    """End this process, once in each rollout; the last time after the processes that keep copies of its state."""
    if not _is_due(args, rollout_id, step_id, (1,) if Path(args.save).name == "critic" else (2, 3)):
        return
    for folder in Path("/proc").glob("[0-9]*") if rollout_id == 3 else ():
        try:
            is_keeper = (folder / "cmdline").read_bytes().startswith(b"ray::_Keeper")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if is_keeper and parent == os.getppid():  # of this cluster
            os.kill(int(folder.name), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill(args: Namespace, rollout_id: int, step_id: int, *_: Any) -> None:
    if _is_due(args, rollout_id, step_id, (1,), rank=1):
        os.kill(os.getpid(), signal.SIGKILL)


def stop(args: Namespace, rollout_id: int, step_id: int, *_: Any) -> None:
    if _is_due(args, rollout_id, step_id, (1,), rank=1):
        os.kill(os.getpid(), signal.SIGSTOP)


def poison(args: Namespace, rollout_id: int, step_id: int, model: list[torch.nn.Module], *_: Any) -> None:
    """Set a weight of the last of two ranks to a value that is not finite."""
    if _is_due(args, rollout_id, step_id, (1,), rank=1):
        with torch.no_grad():
            next(model[0].parameters()).fill_(float("nan"))


def change(args: Namespace, rollout_id: int, step_id: int, model: list[torch.nn.Module], *_: Any) -> None:
    if _is_due(args, rollout_id, step_id, (1,), rank=1):
        with torch.no_grad():
            next(model[0].parameters()).mul_(1.001)
