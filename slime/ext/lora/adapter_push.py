"""The push of an adapter alone (``--lora-push adapter``), as a transport."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.update_weight.transport import SentWeights, Transport
from slime.ext.lora.engine_adapters import as_engines_call, push_adapter
from slime.ext.lora.peft_folder import peft_config
from slime.ext.lora.state import adapter_table, peft_tensors
from slime.weights.push.engine import EngineProxy
from slime.weights.push.state import Push, PushReport, TrainerRanks


class AdapterPush(Transport):
    """Gathers the adapter on rank 0, which hands it to every engine; they need no pause."""

    sends_model = False

    def __init__(self, args: Namespace, ranks: TrainerRanks) -> None:
        self._table, self._base_model, self._dtype = adapter_table(args), args.hf_checkpoint, args.params_dtype
        self._weights: SentWeights | None = None

    def connect(self, engines: Sequence[EngineProxy], weights: SentWeights) -> None:
        """Know where the adapter comes from; engines need no connection."""
        self._weights = weights

    def send(self, push: Push) -> PushReport:
        """Have the engines serve the present adapter under the version of the push."""
        weights = self._weights
        assert weights is not None
        with push.step("gather"):
            host_weights = weights.get_host_weights()
            tensors = peft_tensors(self._table, weights.model, host_weights=host_weights, device=None)
            own = {as_engines_call(name): tensor for name, tensor in tensors.items()}
        peft = peft_config(own, self._table.config, base_model=self._base_model)
        return push_adapter(push, own, self._dtype, peft, sglang.prepare)
