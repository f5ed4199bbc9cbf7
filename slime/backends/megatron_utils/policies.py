"""The policies that a run keeps besides the one in training, and when one is copied to another.

    ref            --ref-load, or with added parameters the model without them; replaced by the actor every
                   --ref-update-interval rollouts, and restored from the checkpoint of that rollout in a resumed run
    args.frozen_policies  those that extensions request; they never change
    rollout_actor  --keep-old-actor: the weights of the last push
    old_actor      --keep-old-actor: the weights that generated the rollout in training

A :class:`ModelSwitch` keeps each of them on the host and copies it into the model for the passes that need it.  If a
transform added parameters, only these are kept and copied; in the reference they contribute nothing.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from slime.backends.megatron_utils import checkpoint, memory
from slime.backends.megatron_utils.checkpoints.checkpoint_reader import FORMAT_FILE
from slime.backends.megatron_utils.model_transform import added_parameters
from slime.flags.algorithm import FrozenPolicy
from slime.flags.checkpoint import is_iteration_folder
from slime.flags.group import flag_of
from slime.observability.telemetry import span
from slime.utils.errors import ConfigError
from slime.weights.pinned_memory import host_tensors_like

logger = logging.getLogger(__name__)


def reference_update(args: Namespace, iteration: int) -> int | None:
    """Return the last rollout up to ``iteration`` after which the actor became the reference; None if there is none.

    ``--keep-last`` keeps its checkpoint, which a run that resumes from ``iteration`` reads the reference from.
    """
    if (interval := args.ref_update_interval) is None:
        return None
    updated = (iteration + 1) // interval * interval - 1
    return int(updated) if updated >= args.num_critic_only_steps else None


class Policies:
    """The sets of weights of an actor: loads them, and copies one to another after training and after pushes."""

    def __init__(self, args: Namespace, model: list[torch.nn.Module], weights: ModelSwitch) -> None:
        self._args, self._model, self._weights = args, model, weights

    def load(self, *, with_ref: bool, is_from_load: bool, iteration: int) -> None:
        """Load the frozen policies.  The model holds the actor before and after.

        Args:
            is_from_load: the actor has the weights of ``--load``.
            iteration: the rollout after which the actor's weights were saved; meaningless in a new run.
        """
        args, weights = self._args, self._weights
        others = list(args.frozen_policies)
        is_read_once = args.finetune and (args.load, args.ckpt_step) == (args.ref_load, args.ref_ckpt_step)
        is_released = memory.sleeps(args.offload_train)
        if with_ref or others or args.keep_old_actor or is_released:
            weights.backup("actor")
        if is_released:
            weights.backup_frozen()
        updated = None if args.finetune and is_from_load else reference_update(args, iteration)
        if with_ref and updated == iteration:
            weights.copy("actor", "ref")
        elif with_ref and (folder := self._checkpoint_of(updated, is_from_load)) is not None:
            others.insert(0, FrozenPolicy("ref", "load", folder, "ckpt_step", None, "ref_log_probs"))
        elif with_ref and added_parameters(self._model) is not None:
            weights.copy_silenced("actor", "ref")
        elif with_ref and is_from_load and is_read_once:
            weights.copy("actor", "ref")
        elif with_ref:
            step = args.ref_ckpt_step
            others.insert(0, FrozenPolicy("ref", "ref_load", args.ref_load, "ref_ckpt_step", step, "ref_log_probs"))
        for policy in others:
            # Weights only: the optimizer and the generators belong to the actor.
            flags = {"flag": flag_of(policy.load_arg), "step_flag": flag_of(policy.step_arg)}
            added = added_parameters(self._model)
            checkpoint.load_weights(args, self._model, policy.folder, added, step=policy.step, **flags)
            weights.active = policy.tag
            weights.backup(policy.tag)
        weights.switch_to("actor")
        if args.keep_old_actor:
            for kept in ("old_actor", "rollout_actor"):
                weights.copy("actor", kept)
            if not (args.finetune and is_from_load):
                logger.warning(
                    "--keep-old-actor: no checkpoint has the weights that drew answers from before this start. The "
                    "rollout of these answers, the first one, gets its old log-probs from the weights that the "
                    "trainer starts with; |dlogp| says how far they are. --use-rollout-logprobs takes the engine's."
                )

    def _checkpoint_of(self, updated: int | None, is_from_load: bool) -> str | None:
        """Return the folder of this run's checkpoint of rollout ``updated``; warn and return None if it is gone."""
        if updated is None:
            return None
        args = self._args
        # With --finetune, --load holds rollouts of another run.  Until a rollout is trained, so may --save.
        begun = None if args.finetune else args.load
        roots = (begun, args.earlier_load) if is_from_load else (args.save, begun)
        given = [root for root in dict.fromkeys(roots) if root is not None]
        for root in given:
            parent = Path(root).parent if is_iteration_folder(root) else root
            folder = checkpoint.checkpoint_folder(parent, updated)
            if (folder / FORMAT_FILE).is_file():
                return str(folder)
        logger.warning(
            "The reference was the actor of rollout %d (--ref-update-interval %d), which is not saved in %s: until "
            "the next update it is --ref-load %s again. Save at multiples of the interval (--save-interval).",
            updated, args.ref_update_interval, " or ".join(map(str, given)) or "any folder (--save)", args.ref_load,
        )  # fmt: skip
        return None

    def record_trained(self, rollout_id: int) -> None:
        """Update the host copies after training, while the model holds the new weights."""
        args, weights = self._args, self._weights
        if "actor" in weights.tags:
            weights.backup("actor")
        if args.keep_old_actor:
            # The next rollout was generated with the weights of the last push, before the one that may follow now.
            weights.copy("rollout_actor", "old_actor")
        interval = args.ref_update_interval
        if interval is not None and "ref" in weights.tags and (rollout_id + 1) % interval == 0:
            with span("ref_model_update"):
                weights.copy("actor", "ref")
            logger.info("The reference model is now the actor of rollout %d.", rollout_id)

    def record_pushed(self) -> None:
        """Record that the engines have the actor's weights."""
        if self._args.keep_old_actor:
            self._weights.copy("actor", "rollout_actor")


class ModelSwitch:
    """Host copies of a model's parameters and buffers, by tag.

    The model holds one set at a time.  ``switch_to`` copies another set into the same tensors, so references held by
    buffers, optimizer shards and schedules stay valid.

    Invariant: ``active`` is the tag of the set in the model.  Its host copy may be older, from ``record_changed``
    until ``backup``.
    """

    def __init__(self, model: Sequence[torch.nn.Module], active: str = "actor") -> None:
        self._model = model
        self._added = added_parameters(model)
        self._host: dict[str, dict[str, Tensor]] = {}
        self._frozen: dict[str, Tensor] = {}
        self.active = active
        self._is_current = False
        """The host copy under ``active``, if any, equals the model."""

    def _live(self, *, frozen: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the live tensors that differ between the sets of weights, or with ``frozen`` those that all share."""
        for index, chunk in enumerate(self._model):
            inner = unwrap_model(chunk)
            for name, tensor in (*inner.named_parameters(), *inner.named_buffers()):
                if getattr(tensor, "has_no_data", False):
                    continue
                if frozen == (self._added is not None and not self._added.owns(name)):
                    yield f"{index}.{name}", tensor

    @property
    def tags(self) -> list[str]:
        return list(self._host)

    def get(self, tag: str) -> Mapping[str, Tensor]:
        """Return the host copy of ``tag`` by ``{chunk}.{parameter name}``.

        Raises:
            ConfigError: nothing is kept under ``tag``.
        """
        if tag not in self._host:
            raise ConfigError(f"no weights are kept under {tag!r}; kept are {self.tags}")
        return self._frozen | self._host[tag]

    def current_copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of live tensors and equal host copies; empty if the copies may be out of date."""
        if not self._is_current or self.active not in self._host:
            return []
        copies = self.get(self.active)
        live = (*self._live(), *self._live(frozen=True))
        return [(tensor, copies[name]) for name, tensor in live if name in copies]

    def record_changed(self) -> None:
        """Record that the model is newer than its host copy."""
        self._is_current = False

    @torch.no_grad()
    def backup(self, tag: str) -> None:
        """Copy the model's tensors to the host, under ``tag``."""
        _copy_to_host(dict(self._live()), self._host.setdefault(tag, {}))
        if tag == self.active:
            self._is_current = True

    @torch.no_grad()
    def backup_frozen(self) -> None:
        """Copy the tensors that all sets of weights share to the host."""
        _copy_to_host(dict(self._live(frozen=True)), self._frozen)

    @torch.no_grad()
    def switch_to(self, tag: str) -> None:
        """Copy the set ``tag`` into the model, unless the model holds it already."""
        if tag == self.active:
            return
        copies = self.get(tag)
        for name, tensor in self._live():
            tensor.detach().copy_(copies[name], non_blocking=True)
        _finish_copies()
        self.active, self._is_current = tag, True

    def copy(self, source: str, target: str) -> None:
        """Copy the host copy ``source`` to ``target``."""
        _copy_to_host(self._host[source], self._host.setdefault(target, {}))

    def copy_silenced(self, source: str, target: str) -> None:
        """Copy ``source`` to ``target``, with added parameters that contribute nothing to the model."""
        self.copy(source, target)
        assert self._added is not None
        self._added.silence(self._host[target])


def _copy_to_host(tensors: Mapping[str, Tensor], copies: dict[str, Tensor]) -> None:
    missing = {name: tensor for name, tensor in tensors.items() if name not in copies}
    copies |= host_tensors_like(missing, is_pinned=torch.cuda.is_available())
    for name, tensor in tensors.items():
        copies[name].copy_(tensor.detach(), non_blocking=True)
    _finish_copies()


def _finish_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
