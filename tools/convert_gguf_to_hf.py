"""Convert a GGUF file of a Llama, Qwen2 or Gemma 3 to a Hugging Face folder: weights, config, tokenizer, template.

    slime convert gguf_to_hf --gguf SmolLM2-135M-Instruct.Q4_1.gguf --output-dir SmolLM2-135M-Instruct

transformers dequantizes the tensors (every type that the ``gguf`` package knows) and restores the order of query and
key rows.  The tokenizer is built here from the file's vocabulary, because transformers' own conversion splits Gemma's
text by another algorithm and leaves out Qwen's special tokens.  Text survives tokenizing and decoding unchanged; the
normalization of the model's own tokenizer (Qwen: NFC) is not in the file.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.utils.errors import ConfigError, SlimeError
from tools.cli import logged_run
from tools.gguf_header import Header, ListInfo, read_gguf_header

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Splitting rules of Llama 3 and Qwen2, which differ in the number of digits per piece; contractions come first."""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens in transformers -> in the file."""
IN_LAYER = {
    "attn_norm": "hidden", "ffn_norm": "hidden",
    "attn_q": "query hidden", "attn_k": "key hidden", "attn_v": "key hidden", "attn_output": "hidden query",
    "ffn_gate": "ffn hidden", "ffn_up": "ffn hidden", "ffn_down": "hidden ffn",
}  # fmt: skip
"""Tensors of a layer -> their sides."""
ARCHITECTURES = {
    "llama": {},
    "qwen2": {"attn_q.bias": "query", "attn_k.bias": "key", "attn_v.bias": "key"},
    "gemma3": {
        "attn_q_norm": "width", "attn_k_norm": "width", "post_attention_norm": "hidden", "post_ffw_norm": "hidden"
    },
}  # fmt: skip
"""Supported architectures -> what a layer has in addition to :data:`IN_LAYER`."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space in the tokens of SentencePiece."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the splitter, by its name in the file: byte-level BPE merges only within its pieces.

    Raises:
        ConfigError: the name is unknown.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    def split_by(digits: str) -> PreTokenizer:
        cut = Split(Regex(CONTRACTIONS + WORDS % digits), behavior="isolated")
        return Sequence([cut, ByteLevel(add_prefix_space=False, use_regex=False)])

    known = {
        "gpt-2": lambda: ByteLevel(add_prefix_space=False),
        "smollm": lambda: Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
        "llama-bpe": lambda: split_by("{1,3}"),
        "qwen2": lambda: split_by(""),
    }
    if name not in known:
        raise ConfigError(
            f"tokenizer.ggml.pre is {name!r}: how it cuts text is not known here, only {', '.join(sorted(known))}. "
            "Take the tokenizer from the model's own Hugging Face folder."
        )
    return known[name]()


def check_is_supported(header: Header) -> None:
    """Check that the tensors match the architecture and sizes that the file names.

    Raises:
        ConfigError: the architecture is unsupported; the rotary frequencies are scaled, by a recipe that the file
            lacks or transformers does not read; or the tensors do not have the sizes in the file's keys.
    """
    fields, shapes = header.fields, header.shapes
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"general.architecture is {architecture!r:.80}; only {', '.join(map(repr, ARCHITECTURES))} "
            "can be converted"
        )
    if "rope_freqs.weight" in shapes or fields.get(f"{architecture}.rope.scaling.type", "none") != "none":
        raise ConfigError(
            "the file's rotary frequencies are scaled (rope_freqs.weight or rope.scaling.type), and the factors for "
            "config.json cannot be told from it. Take the model's own Hugging Face folder."
        )
    expected = _expected_shapes(architecture, fields, len(shapes), has_output="output.weight" in shapes)
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise ConfigError(
                f"the file has {name[:80]} {list(shapes.get(name, ()))}, and by its keys that is "
                f"{list(expected.get(name, ()))}; such a model cannot be converted. Download it again."
            )
    for name, value in fields.items():
        if isinstance(value, float) and not 0 < value < float("inf") and name.startswith(f"{architecture}."):
            raise ConfigError(f"{name} is {value}; it must be above 0")


def _expected_shapes(
    architecture: str, fields: Mapping[str, Any], num_tensors: int, *, has_output: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors, given its sizes."""

    def size(name: str, default: int | None = None) -> int:
        value = fields.get(f"{architecture}.{name}", default)
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"{architecture}.{name} is {str(value)[:80]!r}; it must be a number above 0. Download the file again."
            )
        return value

    hidden, ffn, heads, layers = map(
        size, ("embedding_length", "feed_forward_length", "attention.head_count", "block_count")
    )
    width = size("attention.key_length", size("rope.dimension_count", hidden // heads))
    sides = {
        "hidden": hidden, "ffn": ffn, "width": width,
        "query": heads * width, "key": size("attention.head_count_kv", heads) * width,
    }  # fmt: skip
    rows = size("vocab_size", _vocabulary(fields))
    size("context_length")
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (rows, hidden), "output_norm.weight": (hidden,)}
    if has_output:
        shapes["output.weight"] = (rows, hidden)
    in_layer = {
        f"{name}.weight" if "." not in name else name: tuple(sides[side] for side in shape.split())
        for name, shape in (IN_LAYER | ARCHITECTURES[architecture]).items()
    }
    if layers * len(in_layer) + len(shapes) != num_tensors:
        raise ConfigError(
            f"the file has {num_tensors} tensors, and {architecture}.block_count {layers} makes "
            f"{layers * len(in_layer) + len(shapes)} with {len(in_layer)} in a layer. Download it again."
        )
    return shapes | {f"blk.{n}.{name}": shape for n in range(layers) for name, shape in in_layer.items()}


def _vocabulary(fields: Mapping[str, Any]) -> int:
    """Return the number of tokens.

    Raises:
        ConfigError: the tokenizer's lists do not match each other.
    """
    tokens = fields.get("tokenizer.ggml.tokens")
    if (
        not isinstance(tokens, ListInfo)
        or not tokens.is_text
        or not isinstance(fields.get("tokenizer.ggml.model"), str)
    ):
        raise ConfigError("the file has no tokenizer (tokenizer.ggml.model, tokenizer.ggml.tokens). Take another one.")
    for name in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        if name in fields and fields[name] != ListInfo(is_text=False, count=tokens.count):
            raise ConfigError(f"{name} is {str(fields[name])[:80]}; it must be a list of {tokens.count} numbers.")
    for key in SPECIAL.values():
        number = fields.get(f"tokenizer.ggml.{key}_token_id", 0)
        if type(number) is not int or not 0 <= number < tokens.count:
            raise ConfigError(f"tokenizer.ggml.{key}_token_id is {str(number)[:80]}; there are {tokens.count} tokens.")
    return tokens.count


def byte_level_bpe(keys: Mapping[str, Any]) -> Tokenizer:
    """Return GPT-2's kind of tokenizer: bytes, merged by the file's list."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE

    vocabulary = {token: number for number, token in enumerate(keys["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in keys["merges"]]
    name = keys.get("pre", "gpt-2")
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=name == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizer(name)
    backend.decoder = ByteLevel()
    return backend


def sentencepiece_bpe(keys: Mapping[str, Any]) -> Tokenizer:
    """Return SentencePiece's kind of tokenizer: characters, merged in the order of the pairs' scores."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    vocabulary = {token: number for number, token in enumerate(keys["tokens"])}
    unknown = keys["tokens"][keys.get("unknown_token_id", 0)]
    merges = list(_merges(keys["tokens"], keys["scores"], keys["token_type"]))
    backend = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if keys.get("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(" "), normalizers.Replace(" ", SPACE)])
        back.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence(back)
    return backend


def _merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield the pairs that form a token, in the order of their scores."""
    from gguf import TokenType

    normal = {
        token: -score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == TokenType.NORMAL
    }
    for token in sorted(normal, key=normal.__getitem__):
        for cut in range(1, len(token)):
            if token[:cut] in normal and token[cut:] in normal:
                yield token[:cut], token[cut:]


BACKENDS = {"gpt2": byte_level_bpe, "llama": sentencepiece_bpe}
"""``tokenizer.ggml.model`` -> what builds it."""


def load_tokenizer(gguf: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Return the file's tokenizer: its vocabulary, splitting rules, special tokens and chat template.

    Raises:
        ConfigError: the file's kind of tokenizer, or its splitting rules, are unknown.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    if (model := fields["tokenizer.ggml.model"]) not in BACKENDS:
        raise ConfigError(
            f"tokenizer.ggml.model is {model!r}; {', '.join(map(repr, BACKENDS))} are read. "
            "Take the tokenizer from the model's own Hugging Face folder."
        )
    reader = GGUFReader(gguf)
    keys = {
        key.removeprefix("tokenizer.ggml."): reader.fields[key].contents() for key in fields if "tokenizer." in key
    }
    tokens = keys["tokens"]
    backend = BACKENDS[model](keys)
    for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        whole = [token for token, its in zip(tokens, keys.get("token_type", ()), strict=False) if its == kind]
        backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in whole])
    named = {role: keys[f"{key}_token_id"] for role, key in SPECIAL.items() if f"{key}_token_id" in keys}
    if "bos" in named and keys.get("add_bos_token", model == "llama"):
        bos = tokens[named["bos"]]
        backend.post_processor = TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, named["bos"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=keys.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": tokens[number] for role, number in named.items()},
    )


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write the folder.

    Raises:
        ConfigError: the file is missing, damaged or of another kind, or the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--output-dir {folder} is not empty; name a new folder")
    header = read_gguf_header(gguf)
    check_is_supported(header)
    try:
        model, tokenizer = _load(gguf, header, dtype)
    except SlimeError:
        raise
    except Exception as error:  # transformers and tokenizers raise anything for keys that they do not expect
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"transformers cannot read --gguf {gguf} ({type(error).__name__}: {reason}).") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:  # a killed conversion leaves no folder
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for file in Path(scratch).iterdir():
            file.chmod(0o644)  # safetensors and tempfile make files that only their owner can read
        Path(scratch).chmod(0o755)
        Path(scratch).rename(folder)
        Path(scratch).mkdir()
    logger.info("%s: %d tensors in %s, tokenizer of %d", folder, len(header.shapes), dtype, len(tokenizer))


def _load(gguf: Path, header: Header, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(gguf, header.fields)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    if len(model.state_dict()) - model.config.tie_word_embeddings != len(header.shapes):
        raise ConfigError(f"{gguf} has {len(header.shapes)} tensors, of which transformers did not read all")
    return model, tokenizer


def main() -> None:
    """Run the command line."""
    from slime.backends.sglang_utils import cpu_shim

    cpu_shim.install()  # transformers cannot import its models if the installed torchvision does not match this torch
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="the file")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write; new or empty")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights written")
    options = parser.parse_args()
    with logged_run():
        convert(options.gguf, options.output_dir, options.dtype)


if __name__ == "__main__":
    main()
