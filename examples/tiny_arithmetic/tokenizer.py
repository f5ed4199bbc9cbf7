"""A character-level Hugging Face fast tokenizer with 128 entries and the ChatML template.

ASCII text survives encoding and decoding; any other character becomes a space.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 128
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, END_ID = 0, 2

_SPECIAL = [PAD, START, END]
_WORDS = ["\\boxed{", "mod", "system", "user", "assistant", "<think>", "</think>"]
"""Encoded as one token each, to keep prompts and answers short."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; ids 0, 1 and 2 are padding, start of turn and end of turn."""
    characters = ["\n"] + [chr(code) for code in range(32, 127)]
    entries = _SPECIAL + _WORDS + characters
    entries += [f"<|reserved_{number}|>" for number in range(VOCAB_SIZE - len(entries))]
    core = Tokenizer(models.WordLevel({entry: index for index, entry in enumerate(entries)}, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in _WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
