"""A trainer rank of the service: a rank with adapters, which does the work of ``AdapterTrainer``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.backends.megatron_utils.actor import MegatronTrainRayActor
from slime.backends.megatron_utils.guide import Guide
from slime.backends.megatron_utils.update_weight.transport import MakeTransport
from slime.ext.training_api.adapter_trainer import AdapterTrainer
from slime.ext.training_api.flags import TrainingApiConfig


class ServiceRank(MegatronTrainRayActor):
    """One rank; it has no optimizer (``--num-rollout 0``): every client has its Adam."""

    def init(
        self,
        args: Namespace,
        role: str,
        with_ref: bool = False,
        transforms: tuple[type, ...] = (),
        transport: MakeTransport | None = None,
        guides: tuple[type[Guide], ...] = (),
    ) -> int:
        """Build and load the model; see the base class."""
        start = super().init(args, role, with_ref, transforms, transport, guides)
        config = TrainingApiConfig.of(args)
        self._clients = AdapterTrainer(
            args,
            self.model,
            packs_clients=config.training_api_pack_clients,
            num_on_device=config.training_api_gpu_adapters,
        )
        return start

    def of_clients(self, method: str, *arguments: Any) -> Any:
        """Call a method of :class:`AdapterTrainer`."""
        return getattr(self._clients, method)(*arguments)
