"""Convert a GGUF file of a Llama-like model to a Hugging Face folder: weights, config, tokenizer, chat template.

    python tools/convert_gguf_to_hf.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --output-dir SmolLM2-135M-Instruct

transformers dequantises the tensors (every type that the ``gguf`` package knows) and undoes the file's order of query
and key rows.  What it leaves wrong in a tokenizer is set here from the file: how text is cut before merging, that text
comes back from tokens unchanged, and which tokens are special.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.utils.errors import ConfigError, SlimeError
from tools.cli import logged_run
from tools.gguf_header import Header, ListInfo, read_gguf_header

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Cuts of Llama 3 and Qwen2, which differ in how many digits stay together; contractions come first."""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens in transformers -> in the file."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return what cuts text into the pieces inside which byte-level BPE merges, by its name in the file.

    Raises:
        ConfigError: the name is none of those known here.
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
    """Check that the tensors are those of the Llama whose sizes the file names.

    Raises:
        ConfigError: it is of another architecture, has scaled rotary frequencies, whose recipe the file lacks, or
            sizes that its tensors do not have.
    """
    fields, shapes = header.fields, header.shapes
    if (architecture := fields.get("general.architecture")) != "llama":
        raise ConfigError(f"general.architecture is {architecture!r}; only 'llama' can be converted")
    if "rope_freqs.weight" in shapes:
        raise ConfigError(
            "the file has rope_freqs.weight: rotary frequencies are scaled (Llama 3.1 and later), and the factors for "
            "config.json cannot be told from it. Take the model's own Hugging Face folder."
        )
    expected = _expected_shapes(fields, len(shapes), has_output="output.weight" in shapes)
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise ConfigError(
                f"the file has {name[:80]} {list(shapes.get(name, ()))}, and by its keys that is "
                f"{list(expected.get(name, ()))}; such a model cannot be converted. Download it again."
            )
    for name, value in fields.items():
        if isinstance(value, float) and not 0 < value < float("inf") and name.startswith("llama."):
            raise ConfigError(f"{name} is {value}; it must be above 0")


def _expected_shapes(fields: Mapping[str, Any], num_tensors: int, *, has_output: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama's tensors by its sizes."""

    def size(name: str, default: int | None = None) -> int:
        value = fields.get(f"llama.{name}", default)
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"llama.{name} is {str(value)[:80]!r}; it must be a number above 0. Download the file again."
            )
        return value

    hidden, ffn, heads, layers = map(
        size, ("embedding_length", "feed_forward_length", "attention.head_count", "block_count")
    )
    width = size("rope.dimension_count", hidden // heads)
    query, key = heads * width, size("attention.head_count_kv", heads) * width
    rows = size("vocab_size", _vocabulary(fields))
    size("context_length")
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (rows, hidden), "output_norm.weight": (hidden,)}
    if has_output:
        shapes["output.weight"] = (rows, hidden)
    in_layer = {
        "attn_norm": (hidden,), "ffn_norm": (hidden,),
        "attn_q": (query, hidden), "attn_k": (key, hidden), "attn_v": (key, hidden), "attn_output": (hidden, query),
        "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn),
    }  # fmt: skip
    if layers * len(in_layer) + len(shapes) != num_tensors:
        raise ConfigError(
            f"the file has {num_tensors} tensors, and llama.block_count {layers} makes "
            f"{layers * len(in_layer) + len(shapes)} with {len(in_layer)} in a layer. Download it again."
        )
    return shapes | {f"blk.{n}.{name}.weight": shape for n in range(layers) for name, shape in in_layer.items()}


def _vocabulary(fields: Mapping[str, Any]) -> int:
    """Return the number of tokens.

    Raises:
        ConfigError: the tokenizer's lists do not fit each other.
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


def load_tokenizer(gguf: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Return the file's tokenizer, with the cuts and special tokens that the file names."""
    from tokenizers.decoders import ByteLevel
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if fields["tokenizer.ggml.model"] == "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer(fields.get("tokenizer.ggml.pre", "gpt-2"))
        tokenizer.backend_tokenizer.decoder = ByteLevel()  # transformers' drops a space at the front
        tokenizer.clean_up_tokenization_spaces = False
    for role, key in SPECIAL.items():
        if (number := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(number))
    return tokenizer


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
            file.chmod(0o644)  # safetensors and tempfile write for one user alone
        Path(scratch).chmod(0o755)
        Path(scratch).rename(folder)
        Path(scratch).mkdir()
    logger.info("%s: %d tensors in %s, tokenizer of %d", folder, len(header.shapes), dtype, len(tokenizer))


def _load(gguf: Path, header: Header, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    if len(model.state_dict()) - model.config.tie_word_embeddings != len(header.shapes):
        raise ConfigError(f"{gguf} has {len(header.shapes)} tensors, of which transformers did not read all")
    return model, load_tokenizer(gguf, header.fields)


def main() -> None:
    """Run the command line."""
    from slime.backends.sglang_utils import cpu_shim

    cpu_shim.install()  # transformers cannot import its models beside a torchvision that does not fit this torch
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="the file")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write; new or empty")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights written")
    options = parser.parse_args()
    with logged_run():
        convert(options.gguf, options.output_dir, options.dtype)


if __name__ == "__main__":
    main()
