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
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.utils.errors import ConfigError
from tools.cli import logged_run

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Cuts of Llama 3 and Qwen2, which differ in how many digits stay together; contractions come first."""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"


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


def check_is_supported(reader: GGUFReader) -> None:
    """Raise ConfigError for another architecture, and for scaled rotary frequencies, whose recipe the file lacks."""
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "llama":
        raise ConfigError(f"general.architecture is {architecture!r}; only 'llama' can be converted")
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise ConfigError(
            "the file has rope_freqs.weight: rotary frequencies are scaled (Llama 3.1 and later), and the factors for "
            "config.json cannot be told from it. Take the model's own Hugging Face folder."
        )


def load_tokenizer(gguf: Path, reader: GGUFReader) -> PreTrainedTokenizerBase:
    """Return the file's tokenizer, with the cuts and special tokens that the file names."""
    from tokenizers.decoders import ByteLevel
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    fields = reader.fields
    if fields["tokenizer.ggml.model"].contents() == "gpt2":
        pre = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else "gpt-2"
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer(pre)
        tokenizer.backend_tokenizer.decoder = ByteLevel()  # transformers' drops a space at the front
        tokenizer.clean_up_tokenization_spaces = False
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            token = tokenizer.convert_ids_to_tokens(int(field.contents()))
            setattr(tokenizer, f"{role}_token", token)
    return tokenizer


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write the folder.

    Raises:
        ConfigError: the file is missing or of another kind, the folder is not empty, or a tensor was left out.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    if not gguf.is_file():
        raise ConfigError(f"--gguf {gguf} is no file")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--output-dir {folder} is not empty; name a new folder")
    try:
        reader = GGUFReader(gguf)
    except ValueError as error:
        raise ConfigError(f"--gguf {gguf} is no GGUF file: {error}") from None
    check_is_supported(reader)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    if len(model.state_dict()) - model.config.tie_word_embeddings != len(reader.tensors):
        raise ConfigError(f"{gguf} has {len(reader.tensors)} tensors, of which transformers did not read all")
    tokenizer = load_tokenizer(gguf, reader)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:  # a killed conversion leaves no folder
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for file in Path(scratch).iterdir():
            file.chmod(0o644)  # safetensors and tempfile write for one user alone
        Path(scratch).chmod(0o755)
        Path(scratch).rename(folder)
        Path(scratch).mkdir()
    logger.info("%s: %d tensors in %s, tokenizer of %d", folder, len(reader.tensors), dtype, len(tokenizer))


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
