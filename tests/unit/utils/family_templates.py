"""Small chat templates with the structure of every supported family's, and tokenizers that use them.

Each has the family's roles, ends of turns, calls, tool answers, reasoning and refusals.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


class Family(NamedTuple):
    """A template, its special tokens (the first is eos), and what the model generates at the end of its turns."""

    template: str
    special: tuple[str, ...]
    end: str
    call_end: str


_CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_QWEN_CALLS = (
    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)
_QWEN_TOOL = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_TOOLS = "{% if tools %}Tools: {{ tools | tojson }}{% endif %}"

QWEN2_5 = (
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}Be good.{% endif %}"
    + _TOOLS
    + "<|im_end|>\n{% for m in messages %}{% if m.role == 'tool' %}"
    + _QWEN_TOOL
    + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content or '' }}"
    + _QWEN_CALLS
    + "<|im_end|>\n{% elif not loop.first or m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Reasoning is kept after the last question; if the last turn has none, it gets an empty block.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    + _QWEN_TOOL
    + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}{{ (m.content or '').split('</think>')[-1].lstrip('\n') }}"
    + _QWEN_CALLS
    + "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

# The prompt opens the thinking block; parameters are XML; a conversation needs a question.
QWEN3_5 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    + _QWEN_TOOL
    + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{% if loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)

# Turns have no end token; the next role ends them.
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM4 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n" + _TOOLS + "{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% if m.content or not m.tool_calls %}<|assistant|>\n{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<|assistant|>{{ c.function.name }}\n{{ c.function.arguments | tojson }}"
    "{% endfor %}{% else %}<|{{ {'tool': 'observation'}.get(m.role, m.role) }}|>\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM4_5 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "<think>{{ m.reasoning_content or '' }}</think>{% if m.content %}\n{{ m.content.strip() }}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}{% endif %}"
)

# Arguments are joined to other text; no header follows a tool answer; old reasoning is dropped.
_DEEPSEEK = tuple(
    f"<\uff5c{name}\uff5c>"
    for name in (
        *(
            "end\u2581of\u2581sentence",
            "begin\u2581of\u2581sentence",
            "User",
            "Assistant",
            "tool\u2581calls\u2581begin",
        ),
        *("tool\u2581call\u2581begin", "tool\u2581sep", "tool\u2581call\u2581end", "tool\u2581calls\u2581end"),
        *("tool\u2581outputs\u2581begin", "tool\u2581outputs\u2581end"),
    )
)
_E, _B, _U, _A, _CS, _C, _SEP, _CE, _CSE, _O, _OE = _DEEPSEEK


def _deepseek(opening: str) -> str:
    return (
        _B + "{% set ns = namespace(tool=false) %}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        f"{{% elif m.role == 'user' %}}{{% set ns.tool = false %}}{_U}{{{{ m.content }}}}"
        f"{{% elif m.role == 'tool' %}}{{% if not ns.tool %}}{_O}{{% endif %}}{{% set ns.tool = true %}}"
        "{{ m.content }}"
        f"{{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}}{_OE}{{% endif %}}"
        f"{{% else %}}{{% if not ns.tool %}}{_A}{{% endif %}}{{% set ns.tool = false %}}"
        "{{ (m.content or '').split('</think>')[-1] }}"
        f"{{% for c in m.tool_calls or [] %}}{{% if loop.first %}}{_CS}{{% endif %}}"
        f"{{{{ '{_C}function{_SEP}' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```{_CE}' }}}}"
        f"{{% if loop.last %}}{_CSE}{{% endif %}}{{% endfor %}}{_E}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt and not ns.tool %}}{_A}{opening}{{% endif %}}"
    )


_KIMI = (
    *("<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "<|tool_calls_section_end|>",
)
KIMI = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% if loop.first %}<|tool_calls_section_begin|>{% endif %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}<|tool_call_end|>"
    "{% if loop.last %}<|tool_calls_section_end|>{% endif %}{% endfor %}"
    "{% elif m.role == 'tool' %}<|im_system|>{{ m.name or m.role }}<|im_middle|>## Return\n{{ m.content }}"
    "{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)

MINIMAX = (
    "]~!b[{% for m in messages %}]~b]{{ {'assistant': 'ai'}.get(m.role, m.role) }}\n"
    "{% if m.role == 'tool' %}<response>{{ m.content }}</response>{% else %}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}\n<minimax:tool_call>\n<invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}'
    "</invoke>\n</minimax:tool_call>{% endfor %}{% endif %}[e~[\n{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)

# The last turn ends differently; a tool answer needs its call, which names the tool.
GPT_OSS = (
    "{% set ns = namespace(call=none) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% set ns.call = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ ns.call }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}{% set ns.call = none %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
    "{% elif m.role == 'tool' %}{% if not ns.call %}{{ raise_exception('Message has tool role, but there was no "
    "previous assistant message with a tool call!') }}{% endif %}"
    "<|start|>functions.{{ ns.call }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_HARMONY = ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")

# Tools are listed in the first question; one call per turn, whose content is dropped.
_LLAMA = ("<|eot_id|>", "<|eom_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# Consecutive turns of one role are refused; the system message is part of the first question; no tools.
GEMMA3 = (
    "<bos>{% if messages[0].role == 'system' %}{% set said = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set said = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ said if loop.first else '' }}"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_GEMMA = ("<end_of_turn>", "<start_of_turn>", "<bos>", "<eos>")

# The same, without a header of the answer; tools are listed before the last question; ids have nine letters.
MISTRAL = (
    "{% set ns = namespace(index=0, last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% if m.role != 'tool' and not m.tool_calls and m.role != 'system' %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('After the optional system message, "
    "conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}<s>{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{{ ', ' if not loop.last else '' }}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_RESULTS] {{ m.content | tojson }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
_MISTRAL = (
    *("</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)

FAMILIES = {
    "qwen2.5": Family(QWEN2_5, _CHATML, "<|im_end|>", "<|im_end|>"),  # MiMo's is similar
    "qwen3": Family(QWEN3, _CHATML, "<|im_end|>", "<|im_end|>"),
    "qwen3.5": Family(QWEN3_5, _CHATML, "<|im_end|>", "<|im_end|>"),
    "glm4": Family(GLM4, _GLM, "<|user|>", "<|observation|>"),
    "glm4.5": Family(GLM4_5, _GLM, "<|user|>", "<|observation|>"),  # 4.7's and 5's are similar
    "deepseek-v3": Family(_deepseek(""), _DEEPSEEK, _E, _E),
    "deepseek-r1": Family(_deepseek("<think>\n"), _DEEPSEEK, _E, _E),
    "kimi": Family(KIMI, _KIMI, "<|im_end|>", "<|im_end|>"),
    "minimax": Family(MINIMAX, ("[e~[", "]~!b[", "]~b]"), "[e~[", "[e~["),
    "gpt-oss": Family(GPT_OSS, _HARMONY, "<|return|>", "<|call|>"),
    "llama3": Family(LLAMA3, _LLAMA, "<|eot_id|>", "<|eot_id|>"),
    "gemma3": Family(GEMMA3, _GEMMA, "<end_of_turn>", "<end_of_turn>"),
    "mistral": Family(MISTRAL, _MISTRAL, "</s>", "</s>"),
}
WITHOUT_TOOLS = ("gemma3",)


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the family's special tokens and template."""
    family = FAMILIES[name]
    alphabet = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=family.special[0], chat_template=family.template
    )
