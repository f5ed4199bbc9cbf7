"""The policies that a run keeps beside the one in training: which there are, and when each becomes another.

    ref            --ref-load; becomes the actor every --ref-update-interval rollouts
    teacher        --opd-teacher-load; never changes
    rollout_actor  --keep-old-actor: what the engines have since the last push
    old_actor      --keep-old-actor: what drew the rollout that is trained on

Each lies on the host, in a ``ModelSwitch``, and is put into the model for the passes that need it.
"""

from __future__ import annotations

import logging
from argparse import Namespace

import torch

from slime.backends.megatron_utils import checkpoint, memory
from slime.backends.megatron_utils.model_switch import ModelSwitch
from slime.observability.timer import timer

logger = logging.getLogger(__name__)


class Policies:
    """The sets of weights of an actor, and their turns.

    Args:
        args: the run's arguments.
        model: this rank's chunks, with the actor's weights in them.
        weights: the host copies.
    """

    def __init__(self, args: Namespace, model: list[torch.nn.Module], weights: ModelSwitch) -> None:
        self._args, self._model, self._weights = args, model, weights

    def load(self, *, with_ref: bool, with_teacher: bool) -> None:
        """Load the frozen policies; the model holds the actor afterwards, as before."""
        args, weights = self._args, self._weights
        others = {"ref": ("ref_load", args.ref_ckpt_step)} if with_ref else {}
        if with_teacher:
            others["teacher"] = ("opd_teacher_load", args.opd_teacher_ckpt_step)
        if others or args.keep_old_actor or (args.offload_train and memory.is_memory_saver_active()):
            weights.backup("actor")
        for tag, (load_arg, step) in others.items():
            # Weights only: the optimizer and the generators belong to the actor.
            frozen = Namespace(
                **{**vars(args), "ckpt_step": step, "finetune": True, "no_load_optim": True, "no_load_rng": True}
            )
            checkpoint.load_checkpoint(frozen, self._model, None, None, load_arg=load_arg)
            weights.rename(tag)
            weights.backup(tag)
        weights.switch_to("actor")
        if args.keep_old_actor:
            for kept in ("old_actor", "rollout_actor"):
                weights.copy("actor", kept)

    def note_trained(self, rollout_id: int) -> None:
        """Bring the host copies up to date with the weights just trained, which are in the model."""
        args, weights = self._args, self._weights
        if "actor" in weights.tags:
            weights.backup("actor")
        if args.keep_old_actor:
            # The next rollout was drawn before the push that may follow now.
            weights.copy("rollout_actor", "old_actor")
        interval = args.ref_update_interval
        if interval is not None and "ref" in weights.tags and (rollout_id + 1) % interval == 0:
            with timer("ref_model_update"):
                weights.copy("actor", "ref")
            logger.info("The reference model is now the actor of rollout %d.", rollout_id)

    def note_pushed(self) -> None:
        """The engines have the actor's weights now."""
        if self._args.keep_old_actor:
            self._weights.copy("actor", "rollout_actor")
