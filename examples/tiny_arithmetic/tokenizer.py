"""A tokenizer of 128 entries, one a character, with the ChatML template: an ordinary Hugging Face fast tokenizer.

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
"""Written as one token each, so that prompts and answers stay short."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; ids 0, 1, 2 are padding, start and end of a turn."""
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
