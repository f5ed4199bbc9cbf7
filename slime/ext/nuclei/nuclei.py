"""The nuclei that an engine's sampler drew from: found in its probabilities, carried as bits, sent as int32 ids.

Shapes: R = requests of the engine's batch, V = vocabulary.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.utils.sglang_meta import TOP_P_IDS_KEYS, TOP_P_OFFSETS_KEYS

IDS_KEY, OFFSETS_KEY = TOP_P_IDS_KEYS[0], TOP_P_OFFSETS_KEYS[0]
ROWS_PER_CHUNK = 64
"""Rows that are sorted at a time where their number does not change the numbers."""

_BITS_PER_WORD = 64


def torch_nuclei(probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor | None) -> Tensor:
    """Return the mask of SGLang's ``pytorch`` sampler: rank < top-k, probability before it <= top-p, p >= p_max min-p.

    It must see the batch as the sampler saw it: how rows are summed on a GPU depends on their number.

    Args:
        probs_RV: what the sampler drew from, after temperature and softmax.
        top_k_R: tokens at most; a large number for all of them.
        top_p_R: in (0, 1].
        min_p_R: in [0, 1]; None where no request has one.

    Returns:
        bool [R, V].  A token of probability 0 is in no nucleus.
    """
    sorted_RV, ids_RV = probs_RV.sort(dim=-1, descending=True)
    before_RV = sorted_RV.cumsum(dim=-1).sub_(sorted_RV)
    rank_V = torch.arange(probs_RV.shape[-1], device=probs_RV.device)
    kept_RV = (rank_V < top_k_R[:, None]) & (before_RV <= top_p_R[:, None]) & (sorted_RV > 0)
    if min_p_R is not None:
        kept_RV &= sorted_RV >= (sorted_RV[:, 0] * min_p_R)[:, None]
    return torch.zeros_like(kept_RV).scatter_(1, ids_RV, kept_RV)


def joint_nuclei(probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Return the mask of FlashInfer's joint top-k top-p sampler; arguments as in :func:`torch_nuclei`.

    It accepts a token when fewer than top-k tokens are more probable and those have less than top-p together: equal
    probabilities are kept or dropped together.
    """
    chunks = []
    for start in range(0, len(probs_RV), ROWS_PER_CHUNK):
        rows = slice(start, start + ROWS_PER_CHUNK)
        sorted_KV = probs_RV[rows].sort(dim=-1, descending=True).values
        before_KV = sorted_KV.cumsum(dim=-1).sub_(sorted_KV)
        rank_V = torch.arange(probs_RV.shape[-1], device=probs_RV.device)
        is_before_K = ((rank_V < top_k_R[rows, None]) & (before_KV < top_p_R[rows, None])).sum(dim=1, keepdim=True)
        lowest_K1 = sorted_KV.gather(1, (is_before_K - 1).clamp_min(0))
        chunks.append((probs_RV[rows] >= lowest_K1) & (probs_RV[rows] > 0))
    return torch.cat(chunks)


def floor_nuclei(renormed_RV: Tensor, min_p_R: Tensor) -> Tensor:
    """Return the mask of FlashInfer's min-p sampler, whose input other filters have cut already."""
    return (renormed_RV > 0) & (renormed_RV >= (renormed_RV.amax(dim=1) * min_p_R)[:, None])


def log_mass(log_probs_RV: Tensor, kept_RV: Tensor) -> Tensor:
    """Return [R]: the log of the probability of each nucleus."""
    return log_probs_RV.masked_fill(~kept_RV, float("-inf")).logsumexp(dim=1)


class PackedNuclei(Sequence[Any]):
    """Nuclei of a batch on their way to the host: ``nuclei[row]`` is its ids as little-endian int32 bytes.

    One bit a token, so that the copy has a size that the host knows and the engine's next step need not wait for it.
    None for a request that did not ask; no bytes where the sampler kept everything.
    """

    def __init__(self, kept_RV: Tensor, asked: Sequence[bool]) -> None:
        bits = _pack_bits(kept_RV)
        self._asked = list(asked)
        self._copied: torch.cuda.Event | None = None
        self._source = bits
        if bits.is_cuda:
            self._bits = torch.empty(bits.shape, dtype=bits.dtype, pin_memory=True)
            self._bits.copy_(bits, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._bits = bits
        self._rows: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self._asked)

    def __getitem__(self, row: Any) -> Any:
        if not self._asked[row]:
            return None
        if self._rows is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._rows = _unpack_bits(self._bits.numpy())
            del self._bits, self._source
        return self._rows[row]


def _pack_bits(kept_RV: Tensor) -> Tensor:
    """Return uint8 [R, 8 words]: one bit a token, the lowest bit first."""
    num_rows, num_tokens = kept_RV.shape
    padded = torch.nn.functional.pad(kept_RV, (0, -num_tokens % _BITS_PER_WORD)).view(num_rows, -1, 8)
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=kept_RV.device)
    return (padded * weights).sum(dim=-1, dtype=torch.uint8)


def _unpack_bits(bits: np.ndarray) -> list[bytes]:
    """Return the ids of each row as bytes; most words are 0, and only the others are looked at."""
    words = bits.view("<u8")
    num_rows, words_per_row = words.shape
    index_N = np.flatnonzero(words)
    byte_N8 = words.reshape(-1)[index_N].view(np.uint8).reshape(-1, 8)
    entry, bit = np.nonzero(np.unpackbits(byte_N8, axis=1, bitorder="little"))
    row, word = np.divmod(index_N[entry], words_per_row)
    ids = (word * _BITS_PER_WORD + bit).astype("<i4")
    starts = np.searchsorted(row, np.arange(num_rows + 1))
    return [ids[starts[n] : starts[n + 1]].tobytes() for n in range(num_rows)]


def pack_meta(meta: dict[str, Any]) -> None:
    """Replace the nuclei of an answer, one per token, by ids and offsets in base64; drop them if it asked for none."""
    spans = meta.get(IDS_KEY)
    if not isinstance(spans, list):
        return
    if not spans or None in spans:
        del meta[IDS_KEY]
        return
    offsets = np.cumsum([0, *(len(span) // 4 for span in spans)]).astype("<i4")
    meta[IDS_KEY] = base64.b64encode(b"".join(spans)).decode("ascii")
    meta[OFFSETS_KEY] = base64.b64encode(offsets.tobytes()).decode("ascii")


class Capture:
    """The nuclei of one call of the sampler, from its probabilities to the answer."""

    def __init__(self, asked: Sequence[bool], *, is_greedy: bool) -> None:
        self._asked = asked
        self._is_greedy = is_greedy
        self._kept_RV: Tensor | None = None
        self._is_whole_R: Tensor | None = None

    def see(
        self,
        probs_RV: Tensor,
        info: Any,
        *,
        backend: str,
        renorm: Mapping[str, Callable[[Tensor, Tensor], Tensor]],
    ) -> None:
        """Find the nuclei in what the sampler is about to draw from.

        Args:
            probs_RV: its probabilities; they are not changed.
            info: SGLang's SamplingBatchInfo, with ``top_ks``, ``top_ps``, ``min_ps``, ``need_min_p_sampling``.
            renorm: FlashInfer's ``top_k`` and ``top_p`` renormalisation, which it applies before a min-p.
        """
        min_p_R = info.min_ps if info.need_min_p_sampling else None
        if backend == "flashinfer" and min_p_R is not None:
            cut_RV = renorm["top_p"](renorm["top_k"](probs_RV, info.top_ks), info.top_ps)
            self._kept_RV = floor_nuclei(cut_RV, min_p_R)
        elif backend == "flashinfer":
            self._kept_RV = joint_nuclei(probs_RV, info.top_ks, info.top_ps)
        else:
            self._kept_RV = torch_nuclei(probs_RV, info.top_ks, info.top_ps, min_p_R)
        self._is_whole_R = (info.top_ps >= 1) & (info.top_ks >= probs_RV.shape[-1]) & (info.min_ps <= 0)

    def correction(self, log_probs_RV: Tensor, token_R: Tensor) -> Tensor:
        """Return [R]: what to subtract from the drawn tokens' log-probs, so that each nucleus sums to 1."""
        kept_RV, is_whole_R = self._found(token_R, log_probs_RV.shape[-1])
        asked_R = torch.tensor(self._asked, device=log_probs_RV.device)
        return torch.where(asked_R & ~is_whole_R, log_mass(log_probs_RV, kept_RV), 0.0)

    def pack(self, token_R: Tensor, vocab_size: int) -> PackedNuclei:
        """Return the nuclei, the drawn tokens included; of requests whose sampler kept everything, none."""
        kept_RV, is_whole_R = self._found(token_R, vocab_size)
        return PackedNuclei(kept_RV & ~is_whole_R[:, None], self._asked)

    def _found(self, token_R: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return the mask of the nuclei, and which requests' sampler kept everything."""
        if self._kept_RV is None or self._is_whole_R is None:
            # No probabilities were cut: greedily the drawn token alone could come, otherwise every token.
            shape = (len(token_R), vocab_size)
            self._kept_RV = torch.full(shape, not self._is_greedy, device=token_R.device)
            self._is_whole_R = torch.full(shape[:1], not self._is_greedy, device=token_R.device)
        return self._kept_RV.scatter_(1, token_R.long()[:, None], True), self._is_whole_R
