"""A GGUF file becomes a Hugging Face folder: every tensor by the format's definition, every token by plain BPE."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import regex
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tools import convert_gguf_to_hf

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
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


def write_gguf(path: Path, *, architecture: str = "llama", pre: str = "smollm", extra: str | None = None) -> None:
    """Every kind of tensor: Q4_1, Q8_0, F16 and F32."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS), writer.add_context_length(128), writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN), writer.add_head_count(HEADS), writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5e4), writer.add_layer_norm_rms_eps(1e-5), writer.add_vocab_size(len(VOCAB))
    writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre(pre), writer.add_token_list(VOCAB)
    kinds = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(VOCAB) - len(SPECIAL))
    writer.add_token_types(kinds), writer.add_token_merges(MERGES), writer.add_chat_template(TEMPLATE)
    writer.add_bos_token_id(1), writer.add_eos_token_id(2), writer.add_unk_token_id(0), writer.add_pad_token_id(2)
    kv_width = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (Kind.Q8_0, len(VOCAB), HIDDEN), "output_norm.weight": (Kind.F32, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (Kind.F32, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (Kind.F32, HIDDEN),
            f"blk.{layer}.attn_q.weight": (Kind.Q4_1, HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (Kind.Q4_1, kv_width, HIDDEN),
            f"blk.{layer}.attn_v.weight": (Kind.Q8_0, kv_width, HIDDEN),
            f"blk.{layer}.attn_output.weight": (Kind.F16, HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": (Kind.Q4_1, FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (Kind.F32, FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (Kind.Q4_1, HIDDEN, FFN),
        }
    if extra is not None:
        shapes[extra] = (Kind.F32, 8)
    for name, (kind, *shape) in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A file, and the folder that the command made of it."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "model.gguf")
    convert_gguf_to_hf.convert(folder / "model.gguf", folder / "hf", "float32")
    return folder / "model.gguf", folder / "hf"


def by_definition(tensor) -> np.ndarray:
    """Blocks of 32 numbers: fp16 scale d (and minimum m in Q4_1), then ``d q + m``; low nibbles are the first half."""
    raw = np.frombuffer(tensor.data.tobytes(), np.uint8)
    shape = [int(side) for side in tensor.shape[::-1]]
    if tensor.tensor_type == Kind.Q4_1:
        blocks = raw.reshape(-1, 20)
        d, m = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[:, :, None]
        values = d * np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1) + m
    elif tensor.tensor_type == Kind.Q8_0:
        blocks = raw.reshape(-1, 34)
        d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        values = d * blocks[:, 2:].copy().view(np.int8)
    else:
        values = raw.view({Kind.F16: np.float16, Kind.F32: np.float32}[tensor.tensor_type]).astype(np.float32)
    return values.reshape(shape)


def hf_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF has the two rows of a rotated pair side by side; Hugging Face has them half a head apart."""
    return np.concatenate([np.concatenate([head[0::2], head[1::2]]) for head in np.split(rows, heads)])


def test_every_tensor_is_what_its_bytes_say(pair):
    gguf, folder = pair
    written = load_file(folder / "model.safetensors")
    names = {
        "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for tensor in GGUFReader(gguf).tensors:
        *layer, name, _ = tensor.name.split(".")
        hf_name = ".".join(["model", *(["layers", layer[1]] if layer else []), names[name], "weight"])
        wanted = by_definition(tensor)
        if name in ("attn_q", "attn_k"):
            wanted = hf_order(wanted, HEADS if name == "attn_q" else KV_HEADS)
        assert torch.equal(written.pop(hf_name), torch.from_numpy(wanted)), tensor.name
    assert written == {}


def merge(piece: str) -> list[str]:
    """Byte-level BPE by its definition: the best-ranked pair first, again and again."""
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


def plain_ids(text: str) -> list[int]:
    """Special tokens, then each digit alone, then GPT-2's cuts."""
    ids = []
    for stretch in regex.split("(" + "|".join(map(regex.escape, SPECIAL)) + ")", text):
        if stretch in SPECIAL:
            ids.append(VOCAB.index(stretch))
            continue
        pieces = [cut for part in regex.split(r"(\p{N})", stretch) for cut in regex.findall(GPT2, part)]
        ids += [VOCAB.index(token) for piece in pieces for token in merge(piece)]
    return ids


@pytest.mark.parametrize("text", AWKWARD)
def test_every_text_has_the_tokens_of_plain_merging(pair, text):
    tokenizer = AutoTokenizer.from_pretrained(pair[1])
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids == plain_ids(text)
    assert tokenizer.decode(ids) == text


def test_the_folder_is_complete(pair):
    tokenizer, model = AutoTokenizer.from_pretrained(pair[1]), AutoModelForCausalLM.from_pretrained(pair[1])
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<|im_start|>",
        "<|im_end|>",
        SPECIAL[0],
    )
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert chat == "<|im_start|>user\nthe<|im_end|>\n"
    config = model.config
    assert (config.model_type, config.num_key_value_heads, config.eos_token_id) == ("llama", KV_HEADS, 2)
    assert config.tie_word_embeddings and config.rope_parameters["rope_theta"] == 5e4
    assert model.generation_config.eos_token_id == 2
