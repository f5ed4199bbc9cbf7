"""The push of an adapter alone (``--lora-push adapter``), as a transport."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from slime.backends.megatron_utils import sglang
from slime.backends.megatron_utils.update_weight.bucket_source import SentWeights
from slime.backends.megatron_utils.update_weight.transport import Transport
from slime.ext.lora.flags import lora_config
from slime.ext.lora.peft_folder import peft_config
from slime.ext.lora.state import peft_tensors
from slime.weights.push.adapter import as_engines_call, push_adapter
from slime.weights.push.engine import EngineProxy
from slime.weights.push.state import Push, PushReport, TrainerRanks


class AdapterPush(Transport):
    """Gathers the adapter on rank 0, which hands it to every engine; they need no pause."""

    sends_model = False

    def __init__(self) -> None:
        self._weights: SentWeights | None = None

    @classmethod
    def of(cls, args: Namespace, ranks: TrainerRanks) -> AdapterPush:
        """Make it; flags of the adapter are read with the weights."""
        return cls()

    def connect(self, engines: Sequence[EngineProxy], weights: SentWeights) -> None:
        """Know where the adapter comes from; engines need no connection."""
        self._weights = weights

    def send(self, push: Push) -> PushReport:
        """Have the engines serve the present adapter under the version of the push."""
        weights = self._weights
        assert weights is not None
        args = weights.args
        with push.step("gather"):
            host_weights = weights.get_host_weights()
            tensors = peft_tensors(args, weights.model, host_weights=host_weights, device=None)
            own = {as_engines_call(name): tensor for name, tensor in tensors.items()}
        config = lora_config(args)
        assert config is not None
        peft = peft_config(own, config, base_model=args.hf_checkpoint)
        return push_adapter(push, own, args.params_dtype, peft, sglang.prepare)
