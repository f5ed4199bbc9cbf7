"""Converting GGUF to a Hugging Face folder: every tensor by the format's definition, every token by plain BPE."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pytest
import regex
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tools import convert_gguf_to_hf

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 256, 4, 2, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = bytes_to_unicode()
MERGES = ["Ġ Ġ", "ĠĠ ĠĠ", "1 2", "Ġ 1", "h e", "Ġ t", "Ġt he", "l l", "' t", "Ċ Ċ", "Ã ©"]
VOCAB = [*SPECIAL, *BYTES.values(), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
AWKWARD = [
    *("", " ", "12", "a  12 b", "  the\tthe\r\n\n x", "3.14e-10 + 007", "don't WE'LL 'tis", "the    the", "tail  "),
    *(
        "a . b , c n't",
        "\u4f60\u597d\uff0c\u4e16\u754c",
        "e\u0301 \u00e9 \ufb01",
        "\u0663\u0664 \u00bd \u2167",
        "a\u00a0b\u200bc",
    ),
    *("\U0001f468\u200d\U0001f469\u200d\U0001f467 ok", "<|im_end|> a<|im_start|>", "<|im_en d|>", "\x00\x7f\u0085"),
]


SPACE = "\u2581"
PIECES = [f"{SPACE}t", "he", f"{SPACE}the", "12", f"{SPACE}1", "ll", "\u4f60\u597d", "do", "n'"]
"""Results of merges, best first."""
WHOLE = ["\n\n", "  ", "   ", "<b>"]
"""Split off the text before any merge; not special tokens."""
CHARACTERS = sorted({*"".join(PIECES), *"abcdefghijklmnopqrstuvwxyz.,'<>\n"})
SPM_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
SPM = [*SPM_SPECIAL, *WHOLE, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *CHARACTERS]


def write_tokenizer(writer: GGUFWriter, model: str, pre: str) -> None:
    """A vocabulary and the kinds of its tokens: byte-level BPE, or SentencePiece with scores."""
    writer.add_tokenizer_model(model), writer.add_tokenizer_pre(pre)
    if model == "llama":
        kinds = [TokenType.CONTROL] * 4 + [TokenType.USER_DEFINED] * len(WHOLE) + [TokenType.BYTE] * 256
        writer.add_token_list(SPM), writer.add_token_scores([-float(number) for number in range(len(SPM))])
        writer.add_token_types(kinds + [TokenType.NORMAL] * (len(SPM) - len(kinds)))
        writer.add_pad_token_id(0), writer.add_eos_token_id(1), writer.add_bos_token_id(2), writer.add_unk_token_id(3)
        writer.add_add_bos_token(True), writer.add_add_space_prefix(False)
        return
    kinds = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(VOCAB) - len(SPECIAL))
    writer.add_token_list(VOCAB), writer.add_token_types(kinds), writer.add_token_merges(MERGES)
    writer.add_chat_template(TEMPLATE)
    writer.add_bos_token_id(1), writer.add_eos_token_id(2), writer.add_unk_token_id(0), writer.add_pad_token_id(2)


IN_LAYER = {
    "qwen2": {"attn_q.bias": (HIDDEN,), "attn_k.bias": (HIDDEN // 2,), "attn_v.bias": (HIDDEN // 2,)},
    "gemma3": {
        **dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (HIDDEN // HEADS,)),
        **dict.fromkeys(("post_attention_norm.weight", "post_ffw_norm.weight"), (HIDDEN,)),
    },
}


def write_gguf(
    path: Path, *, architecture: str = "llama", pre: str = "smollm", model: str = "gpt2", extra: str | None = None
) -> None:
    """Every kind of tensor: Q4_1, Q5_0, Q8_0, Q4_K, Q6_K, F16 and F32."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    rows = len(SPM if model == "llama" else VOCAB)
    writer.add_block_count(LAYERS), writer.add_context_length(128), writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN), writer.add_head_count(HEADS), writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5e4), writer.add_layer_norm_rms_eps(1e-5), writer.add_vocab_size(rows)
    if architecture == "gemma3":
        writer.add_key_length(HIDDEN // HEADS), writer.add_sliding_window(16)
    write_tokenizer(writer, model, pre)
    kv_width = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (Kind.Q8_0, rows, HIDDEN), "output_norm.weight": (Kind.F32, HIDDEN)}
    for layer in range(LAYERS):
        in_layer = {
            "attn_norm.weight": (Kind.F32, HIDDEN),
            "ffn_norm.weight": (Kind.F32, HIDDEN),
            "attn_q.weight": (Kind.Q4_1, HIDDEN, HIDDEN),
            "attn_k.weight": (Kind.Q4_1, kv_width, HIDDEN),
            "attn_v.weight": (Kind.Q8_0, kv_width, HIDDEN),
            "attn_output.weight": (Kind.F16, HIDDEN, HIDDEN),
            "ffn_gate.weight": (Kind.Q5_0, FFN, HIDDEN),
            "ffn_up.weight": (Kind.F32, FFN, HIDDEN),
            "ffn_down.weight": (Kind.Q4_K if layer else Kind.Q6_K, HIDDEN, FFN),
        }
        in_layer |= {name: (Kind.F32, *shape) for name, shape in IN_LAYER.get(architecture, {}).items()}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in in_layer.items()}
    if extra is not None:
        shapes[extra] = (Kind.F32, 8)
    for name, (kind, *shape) in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, encode(values, kind, rng), raw_dtype=kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()


def encode(values: np.ndarray, kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """The bytes of a tensor; for the two kinds that the package cannot write, random bytes with small scales."""
    if kind not in SCALES:
        return quantize(values, kind)
    first, size = SCALES[kind]
    blocks = rng.integers(0, 256, (values.size // 256, size), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (len(blocks), (2, 1)[kind == Kind.Q6_K])).astype(np.float16)
    blocks[:, first : first + 2 * scales.shape[1]] = scales.view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


SCALES = {Kind.Q4_K: (0, 144), Kind.Q6_K: (208, 210)}
"""First byte of a block's fp16 scales, and bytes of a block."""


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3"])
def pair(request, tmp_path_factory):
    """A GGUF file, and the folder that the command made of it."""
    folder, model = tmp_path_factory.mktemp("gguf"), "llama" if request.param == "gemma3" else "gpt2"
    pre = "smollm" if request.param == "llama" else request.param
    write_gguf(folder / "model.gguf", architecture=request.param, pre=pre, model=model)
    convert_gguf_to_hf.convert(folder / "model.gguf", folder / "hf", "float32")
    return folder / "model.gguf", folder / "hf"


def q4_k(blocks: np.ndarray) -> np.ndarray:
    """256 numbers ``d s q - dmin m`` in 8 groups, whose 6-bit s and m are packed into 12 bytes."""
    d, dmin = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[:, :, None]
    packed, low = blocks[:, 4:16].astype(int), blocks[:, 16:].reshape(-1, 4, 32)
    scales = [packed[:, j] & 63 for j in range(4)]
    scales += [packed[:, j + 8] & 15 | packed[:, j] >> 6 << 4 for j in range(4)]
    minima = [packed[:, j + 4] & 63 for j in range(4)]
    minima += [packed[:, j + 8] >> 4 | packed[:, j + 4] >> 6 << 4 for j in range(4)]
    groups = [low[:, j // 2] >> 4 * (j % 2) & 15 for j in range(8)]
    parts = [d * s[:, None] * q - dmin * m[:, None] for s, m, q in zip(scales, minima, groups, strict=True)]
    return np.concatenate(parts, axis=1)


def q6_k(blocks: np.ndarray) -> np.ndarray:
    """256 numbers ``d s (q - 32)``: 4 and 2 bits of q stored separately, a signed scale for each 16."""
    low, high = blocks[:, :128].reshape(-1, 2, 2, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    scales, d = blocks[:, 192:208].copy().view(np.int8), blocks[:, 208:].copy().view(np.float16)
    q = [
        (low[:, half, part % 2] >> 4 * (part // 2) & 15 | (high[:, half] >> 2 * part & 3) << 4).astype(int) - 32
        for half in range(2)
        for part in range(4)
    ]
    return d.astype(np.float32) * np.repeat(scales.astype(np.float32), 16, axis=1) * np.concatenate(q, axis=1)


def by_definition(tensor) -> np.ndarray:
    """Blocks of 32 numbers with an fp16 scale d (and minimum m in Q4_1); low nibbles are the first half."""
    raw = np.frombuffer(tensor.data.tobytes(), np.uint8)
    shape = [int(side) for side in tensor.shape[::-1]]
    if tensor.tensor_type == Kind.Q4_1:
        blocks = raw.reshape(-1, 20)
        d, m = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[:, :, None]
        values = d * np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1) + m
    elif tensor.tensor_type == Kind.Q5_0:
        blocks = raw.reshape(-1, 22)
        fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little") << 4
        fours = np.concatenate([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], axis=1)
        values = blocks[:, :2].copy().view(np.float16).astype(np.float32) * ((fours | fifth).astype(int) - 16)
    elif tensor.tensor_type == Kind.Q8_0:
        blocks = raw.reshape(-1, 34)
        d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        values = d * blocks[:, 2:].copy().view(np.int8)
    elif tensor.tensor_type in SCALES:
        values = {Kind.Q4_K: q4_k, Kind.Q6_K: q6_k}[tensor.tensor_type](raw.reshape(-1, SCALES[tensor.tensor_type][1]))
    else:
        values = raw.view({Kind.F16: np.float16, Kind.F32: np.float32}[tensor.tensor_type]).astype(np.float32)
    return values.astype(np.float32).reshape(shape)


def hf_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF stores the two rows of a rotated pair side by side; Hugging Face stores them half a head apart."""
    return np.concatenate([np.concatenate([head[0::2], head[1::2]]) for head in np.split(rows, heads)])


def test_every_tensor_is_what_its_bytes_say(pair):
    gguf, folder = pair
    written = load_file(folder / "model.safetensors")
    names = {
        "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm", "post_ffw_norm": "post_feedforward_layernorm",
    }  # fmt: skip
    architecture = AutoConfig.from_pretrained(folder).model_type
    if architecture == "gemma3_text":
        names |= {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
    for tensor in GGUFReader(gguf).tensors:
        *layer, name, suffix = tensor.name.split(".")
        hf_name = ".".join(["model", *(["layers", layer[1]] if layer else []), names[name], suffix])
        wanted = by_definition(tensor)
        if architecture == "llama" and name in ("attn_q", "attn_k"):
            wanted = hf_order(wanted, HEADS if name == "attn_q" else KV_HEADS)
        if architecture == "gemma3_text" and name.endswith("norm"):
            wanted = wanted - 1  # the file holds the norm's multiplier
        assert torch.equal(written.pop(hf_name), torch.from_numpy(wanted)), tensor.name
    assert written == {}


def merge(piece: str) -> list[str]:
    """Byte-level BPE by its definition: merge the best-ranked pair first, repeatedly."""
    parts = [BYTES[byte] for byte in piece.encode()]
    while True:
        ranks = {
            MERGES.index(f"{a} {b}"): place
            for place, (a, b) in reversed(list(enumerate(zip(parts, parts[1:]))))
            if f"{a} {b}" in MERGES
        }
        if not ranks:
            return parts
        place = ranks[min(ranks)]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def spm_ids(text: str) -> list[int]:
    """Whole tokens, longest first; then repeatedly merge the pair with the best score; bytes for the rest."""
    whole, ids = sorted(SPM_SPECIAL + WHOLE, key=len, reverse=True), []
    for stretch in regex.split("(" + "|".join(map(regex.escape, whole)) + ")", text):
        parts = [stretch] if stretch in whole else list(stretch.replace(" ", SPACE))
        while pairs := [(PIECES.index(a + b), i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in PIECES]:
            place = min(pairs)[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        for part in parts:
            known = part in SPM and not part.startswith("<0x")
            ids += [SPM.index(part)] if known else [SPM.index(f"<0x{byte:02X}>") for byte in part.encode()]
    return ids


CUTS = {
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
              r"|\s+(?!\S)|\s+"],
}  # fmt: skip
"""Patterns that split a text, one after the other; the first keeps what is between its matches."""


def plain_ids(text: str, pre: str) -> list[int]:
    """Special tokens, then the splits: SmolLM2's are single digits and GPT-2's, Qwen's are one pattern."""
    ids = []
    for stretch in regex.split("(" + "|".join(map(regex.escape, SPECIAL)) + ")", text):
        if stretch in SPECIAL:
            ids.append(VOCAB.index(stretch))
            continue
        *first, last = CUTS[pre]
        parts = regex.split(f"({first[0]})", stretch) if first else [stretch]
        pieces = [cut for part in parts for cut in regex.findall(last, part)]
        ids += [VOCAB.index(token) for piece in pieces for token in merge(piece)]
    return ids


@pytest.mark.parametrize("text", AWKWARD)
def test_every_text_has_the_tokens_of_plain_merging(pair, text):
    tokenizer = AutoTokenizer.from_pretrained(pair[1])
    model_type = AutoConfig.from_pretrained(pair[1]).model_type
    if model_type == "qwen2":
        text = unicodedata.normalize("NFC", text)  # transformers' class does so for every Qwen2
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == (
        spm_ids(text)
        if model_type == "gemma3_text"
        else plain_ids(text, {"llama": "smollm"}.get(model_type, model_type))
    )
    assert tokenizer.decode(ids) == text


def test_the_folder_is_complete(pair):
    tokenizer, model = AutoTokenizer.from_pretrained(pair[1]), AutoModelForCausalLM.from_pretrained(pair[1])
    config, named = model.config, (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token)
    if config.model_type == "gemma3_text":
        assert named == ("<bos>", "<eos>", "<unk>")
        assert tokenizer.chat_template is None
        assert tokenizer("the").input_ids[0] == config.bos_token_id == 2
        assert (config.sliding_window, config.rope_parameters["full_attention"]["rope_theta"]) == (16, 5e4)
    else:
        assert named == ("<|im_start|>", "<|im_end|>", SPECIAL[0])
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
        assert chat == "<|im_start|>user\nthe<|im_end|>\n"
        assert tokenizer("the").input_ids[0] != config.bos_token_id
        assert config.rope_parameters["rope_theta"] == 5e4
    assert (config.num_key_value_heads, config.eos_token_id) == (KV_HEADS, tokenizer.eos_token_id)
    assert config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
