"""Engines that one trainer rank reaches by broadcast: those with our loader in one group, stock ones in another."""

from __future__ import annotations

from torch import Tensor

from slime.backends.megatron_utils.update_weight.engines.stock_engines import StockGroup, named_views
from slime.backends.megatron_utils.update_weight.engines.update_group import UpdateGroup
from slime.backends.megatron_utils.update_weight.protocol.push import Push
from slime.backends.megatron_utils.update_weight.protocol.roster import PUSH_FAILURES
from slime.weights.manifest import Manifest
from slime.weights.receiver import WeightReceiver


class RemoteEngines:
    """Two groups behind one door; either may be empty.

    Args:
        name: what the engines call the groups.
    """

    def __init__(self, name: str) -> None:
        self.receivers: list[WeightReceiver] = []
        self._group = UpdateGroup(name)
        self._stock = StockGroup(name)

    def form(self, push: Push) -> None:
        """Have groups of just the engines that are still in the push, or ask for another try without some of them."""
        good = [engine for engine in self.receivers if push.roster.is_good(engine)]
        wanted = [engine for engine in good if engine.acknowledges]
        self._group.form(wanted, push.roster, push.clock)
        if wanted and not self._group.is_whole:
            push.must_repeat = True
        self._stock.form([engine for engine in good if not engine.acknowledges], push.roster, push.clock)

    def send(self, push: Push, index: int, flat: Tensor, manifest: Manifest) -> None:
        """Broadcast a bucket to both groups; once a broadcast broke, nothing more until the push is repeated."""
        if push.must_repeat or push.failures:
            return
        try:
            self._send(push, index, flat, manifest)
        except PUSH_FAILURES as error:
            push.failures.append(error)  # go on through the buckets: the other ranks gather with this one

    def _send(self, push: Push, index: int, flat: Tensor, manifest: Manifest) -> None:
        if self._group.is_whole:
            self._group.broadcast(push.id, index, flat, push.roster, push.clock)
            push.must_repeat = not self._group.is_whole
        if self._stock.members:
            self._stock.broadcast(
                named_views(flat, manifest.buckets[index], manifest), push.version, push.roster, push.clock
            )

    def leave(self) -> None:
        """Give both groups up."""
        self._group.leave()
        self._stock.leave()
