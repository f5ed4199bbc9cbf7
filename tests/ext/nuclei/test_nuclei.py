"""The nuclei of a batch by hand and against loops, and their encoding in an answer."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from slime.backends.sglang_utils.arguments import nuclei_problems
from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig, SGLangConfig
from slime.ext.nuclei import nuclei
from slime.ext.nuclei.nuclei import Capture, joint_nuclei, pack_meta, torch_nuclei
from slime.utils.sglang_meta import read_top_p_spans

ALL = 1 << 30


def limits(rows: list[tuple[int, float, float]]) -> Namespace:
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    return Namespace(top_ks=top_k, top_ps=top_p, min_ps=min_p, need_min_p_sampling=bool((min_p > 0).any()))


def by_loop(probs: list[float], top_k: int, top_p: float, min_p: float, *, keeps_ties: bool) -> set[int]:
    kept = set()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    for rank, token in enumerate(order):
        if keeps_ties:
            above = [p for p in probs if p > probs[token]]
            fits = len(above) < top_k and sum(above) < top_p
        else:
            fits = rank < top_k and sum(probs[other] for other in order[:rank]) <= top_p
        if fits and probs[token] > 0 and probs[token] >= max(probs) * min_p:
            kept.add(token)
    return kept


def test_by_hand() -> None:
    probs = torch.tensor([[0.125, 0.5, 0.0, 0.25, 0.125]] * 4)
    args = torch.tensor([ALL, ALL, 2, ALL]), torch.tensor([0.5, 0.8, 1.0, 1.0])
    kept = torch_nuclei(probs, *args, None)
    # The sum before the second token is 0.5, which is not more than 0.5; of the equal pair the first suffices for 0.8.
    assert [set(row.nonzero().flatten().tolist()) for row in kept] == [{1, 3}, {0, 1, 3}, {1, 3}, {0, 1, 3, 4}]
    kept = joint_nuclei(probs, *args)
    # FlashInfer stops as soon as 0.5 is reached, and cannot distinguish the equal pair.
    assert [set(row.nonzero().flatten().tolist()) for row in kept] == [{1}, {0, 1, 3, 4}, {1, 3}, {0, 1, 3, 4}]
    kept = torch_nuclei(probs[:1], torch.tensor([ALL]), torch.tensor([1.0]), torch.tensor([0.5]))
    assert kept.tolist() == [[False, True, False, True, False]]


@pytest.mark.parametrize("keeps_ties", [False, True])
def test_a_batch_is_what_loops_over_its_rows_give(keeps_ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nuclei, "ROWS_PER_CHUNK", 7)
    generator = torch.Generator().manual_seed(3)
    # Multiples of 2^-12 sum without rounding, and many are equal.
    counts = torch.randint(0, 12, (40, 90), generator=generator).float()
    counts[:, 0] += 4096 - counts.sum(dim=1)
    probs = counts / 4096
    top_k = torch.randint(1, 60, (40,), generator=generator)
    top_p = torch.randint(1, 4096, (40,), generator=generator) / 4096
    kept = joint_nuclei(probs, top_k, top_p) if keeps_ties else torch_nuclei(probs, top_k, top_p, None)
    for row in range(40):
        expected = by_loop(probs[row].tolist(), int(top_k[row]), float(top_p[row]), 0.0, keeps_ties=keeps_ties)
        found = set(kept[row].nonzero().flatten().tolist())
        assert len(found) == len(expected)
        assert sorted(probs[row, list(found)].tolist()) == sorted(probs[row, list(expected)].tolist())


def capture_of(info: Namespace, probs: torch.Tensor, asked: list[bool], backend: str = "pytorch") -> Capture:
    capture = Capture(asked, is_greedy=False)
    capture.see(probs, info, backend=backend, renorm={})
    return capture


def test_log_probs_are_renormalised_over_the_nucleus_where_it_was_asked_for() -> None:
    probs = torch.tensor([[0.125, 0.5, 0.125, 0.25]] * 4)
    info = limits([(ALL, 0.6, 0.0), (ALL, 0.6, 0.0), (ALL, 1.0, 0.0), (ALL, 0.4, 0.0)])
    capture = capture_of(info, probs, [True, False, True, True])
    tokens = torch.tensor([1, 1, 1, 0])  # the last was drawn from outside, as rounding on a GPU may do
    correction = capture.correction(probs.log(), tokens)
    assert correction.exp().tolist() == pytest.approx([0.75, 1.0, 1.0, 0.625])
    packed = capture.pack(tokens, 4)
    ids = [
        None if row is None else torch.frombuffer(bytearray(row), dtype=torch.int32).tolist() if row else []
        for row in packed
    ]
    assert ids == [[1, 3], None, [], [0, 1]]


def test_an_answer_says_ids_and_offsets_as_the_trainer_reads_them() -> None:
    meta = {"top_p_token_ids": [b"\5\0\0\0\7\0\0\0", b"", b"\1\0\0\0"], "other": 1}
    pack_meta(meta)
    ids, offsets = read_top_p_spans(meta, 3)
    assert (ids.tolist(), offsets.tolist()) == ([5, 7, 1], [0, 2, 2, 3])
    for spans in ([], [None, None]):
        meta = {"top_p_token_ids": spans, "other": 1}
        pack_meta(meta)
        assert meta == {"other": 1}


def layout(flags: dict[str, object], worker_type: str = "regular", **overrides: object) -> SGLangConfig:
    of_flags = {"speculative_algorithm": None, "pp_size": 1, "sampling_backend": None, **flags}
    group = ServerGroupConfig(
        worker_type=worker_type, num_gpus=1, num_gpus_per_engine=1, overrides=overrides, of_flags=of_flags
    )
    judge = ServerGroupConfig(
        worker_type="regular", num_gpus=1, num_gpus_per_engine=1, overrides={"speculative_algorithm": "EAGLE"}
    )
    models = [("judge", False, judge), ("policy", True, group)]
    return SGLangConfig(
        models=tuple(ModelConfig(name=n, model_path="/m", update_weights=u, server_groups=(g,)) for n, u, g in models)
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (layout({"speculative_algorithm": "EAGLE"}), "--sglang-speculative-algorithm is EAGLE"),
        (layout({"pp_size": 2}), "--sglang-pp-size is 2"),
        (layout({"sampling_backend": "ascend"}), "--sglang-sampling-backend is ascend"),
        (layout({}, speculative_algorithm="NGRAM"), "--sglang-speculative-algorithm is NGRAM"),
        (layout({}, "prefill"), "--prefill-num-servers"),
        (layout({"sampling_backend": "flashinfer", "pp_size": 1}), None),
        (layout({"speculative_algorithm": "EAGLE"}, speculative_algorithm=None), None),
    ],
)
def test_engines_that_cannot_return_nuclei_are_refused_at_the_start(config, says) -> None:
    found = list(nuclei_problems(config, 0.9))
    assert (says is None and not found) or (len(found) == 1 and says in found[0] and "--rollout-top-p" in found[0])
