"""What the real backend refuses and removes before it starts trainer and engines."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from slime.ext.training_api.megatron_backend import check_service, claim_snapshots
from slime.utils.errors import ConfigError


@pytest.mark.parametrize(("experts", "ranks"), [(8, 1), (None, 2)])
def test_clients_are_not_packed_where_one_could_change_anothers_bits(experts: int | None, ranks: int) -> None:
    layout = {"num_experts": experts, "tensor_model_parallel_size": ranks}
    args = Namespace(lora_rank=4, max_tokens_per_gpu=64, lora_push="adapter", **layout)
    check_service(Namespace(**vars(args), training_api_pack_clients=False))
    with pytest.raises(ConfigError, match="needs a model without experts on one"):
        check_service(Namespace(**vars(args), training_api_pack_clients=True))


def test_a_start_removes_the_snapshots_of_dead_servers_alone(tmp_path: Path) -> None:
    killed, lock = claim_snapshots(tmp_path / "states")
    (killed / "0").mkdir()
    alive, _ = claim_snapshots(tmp_path / "states")
    assert killed.is_dir()
    lock.release()
    own, _ = claim_snapshots(tmp_path / "states")
    assert set((tmp_path / "states").iterdir()) == {alive, own}
