"""The placement of large jobs on four logical nodes of eight GPUs, printed: ``python -m tests.nodes``.

Takes minutes and some gigabytes: every GPU has a process that reports where it is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.nodes.cluster import logical_nodes
from tests.nodes.layouts import arguments, place

NODES, GPUS = 4, 8
CASES = {
    "colocated, four engines of a node": (
        "--colocate --rollout-num-gpus 32 --actor-num-nodes 4 --rollout-num-gpus-per-engine 8",
        False,
    ),
    "colocated, two engines of two nodes": (
        "--colocate --rollout-num-gpus 32 --actor-num-nodes 4 --rollout-num-gpus-per-engine 16",
        False,
    ),
    "apart, two nodes to train and one engine of two nodes": (
        "--actor-num-nodes 2 --rollout-num-gpus 16 --rollout-num-gpus-per-engine 16",
        False,
    ),
    "apart, one node to train (8 ranks meet over gloo), three engines of a node": (
        "--actor-num-nodes 1 --rollout-num-gpus 24 --rollout-num-gpus-per-engine 8",
        True,
    ),
}


def expected_engines(flags: str, addresses: list[str]) -> list[tuple[str, int, int, int]]:
    """(node, first GPU, nnodes, node_rank) of every engine actor, by the rule: GPUs in order, node by node."""
    words = flags.split()
    gpus = int(words[words.index("--rollout-num-gpus") + 1])
    per_engine = int(words[words.index("--rollout-num-gpus-per-engine") + 1])
    offset = 0 if "--colocate" in words else int(words[words.index("--actor-num-nodes") + 1]) * GPUS
    nodes = max(1, per_engine // GPUS)
    per_actor = min(per_engine, GPUS)
    places = [divmod(offset + actor * per_actor, GPUS) for actor in range(gpus // per_actor)]
    return [(addresses[node], gpu, nodes, actor % nodes) for actor, (node, gpu) in enumerate(places)]


def main() -> int:
    """Run every case; return the number of failures as the exit code."""
    failures = 0
    start = time.monotonic()
    with logical_nodes(NODES, GPUS) as cluster, tempfile.TemporaryDirectory() as folder:
        addresses = cluster.addresses
        print(
            f"{NODES} nodes of {GPUS} GPUs after {time.monotonic() - start:.0f} s: {', '.join(addresses)}", flush=True
        )
        for number, (name, (flags, with_trainer)) in enumerate(CASES.items()):
            begun = time.monotonic()
            layout = place(arguments(Path(folder) / str(number), flags), with_trainer=with_trainer)
            engines = layout.engines()
            found = [(e["node"], e["gpu"], e["nnodes"], e["node_rank"]) for e in engines]
            is_right = found == expected_engines(flags, addresses)
            if with_trainer:
                ranks = [(rank, addresses[rank // GPUS], rank % GPUS) for rank in range(layout.trainer.world_size)]
                is_right = is_right and layout.ranks() == ranks
            layout.take_down()
            failures += not is_right
            print(f"{'ok  ' if is_right else 'BAD '} {name} ({time.monotonic() - begun:.0f} s)", flush=True)
            for engine in engines:
                print(
                    f"       engine actor on {engine['node']} from GPU {engine['gpu']}: tp {engine['tp_size']}, node "
                    f"{engine['node_rank']} of {engine['nnodes']}, rendezvous {engine['dist_init_addr']}",
                    flush=True,
                )
    return failures


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tests.nodes", description=__doc__).parse_args()
    sys.exit(main())
