"""A scripted engine that says given words, and a tokenizer whose chat template resembles Qwen3's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.scripted_engine.script import Request, Script
from tests.scripted_engine.server import ScriptedEngine

EOS = "<|im_end|>"

# Reasoning is kept after the last user message and dropped before it; tool results are user turns.
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% elif m.role == 'assistant' -%}
<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, a few merges (so that one text has several encodings), and ChatML's special tokens."""
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("t", "o"), ("to", "o"), ("too", "l"), ("l", "l"), ("a", "n"), ("e", "r")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken(EOS, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, chat_template=TEMPLATE)


def drawn(tokenizer: Any, text: str) -> list[int]:
    """Ids of ``text`` byte by byte: tokens that a policy may generate but no encoder returns."""
    return [token for character in text for token in tokenizer.encode(character, add_special_tokens=False)]


@dataclass
class SpeakingScript(Script):
    """Says ``say(prompt text)``, then the stop token; if the prompt ends within the reply, continues the reply."""

    tokenizer: Any = None
    say: Callable[[str], str] = lambda prompt: "hello"
    replies: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def reply_to(self, request: Request) -> list[int]:
        """The rest of the reply."""
        ids = tuple(request.prompt)
        for prompt, reply in self.replies.items():
            done = len(ids) - len(prompt)
            if 0 < done <= len(reply) and ids[: len(prompt)] == prompt and list(ids[len(prompt) :]) == reply[:done]:
                return reply[done:]
        text = self.say(self.tokenizer.decode(list(ids), skip_special_tokens=False))
        reply = [*drawn(self.tokenizer, text), self.tokenizer.eos_token_id]
        self.replies[ids] = reply
        return reply

    def length_of(self, request: Request) -> int:
        return len(self.reply_to(request))

    def tokens_of(self, request: Request, start: int, stop: int) -> list[int]:
        return self.reply_to(request)[start:stop]


class TalkingEngine(ScriptedEngine):
    """A scripted engine whose answers include the text of their tokens."""

    def __init__(self, tokenizer: Any, say: Callable[[str], str], **kwargs: Any) -> None:
        super().__init__(SpeakingScript(tokenizer=tokenizer, say=say, **kwargs))

    def render(self, request: Request, count: int, kind: str | None, began: float) -> bytes:
        answer = json.loads(super().render(request, count, kind, began))
        tokenizer = self.script.tokenizer
        answer["text"] = tokenizer.decode(answer["output_ids"], skip_special_tokens=False)
        reason = answer["meta_info"]["finish_reason"]
        if reason and reason["type"] == "stop":
            reason["matched"] = tokenizer.eos_token_id
        return json.dumps(answer).encode()
