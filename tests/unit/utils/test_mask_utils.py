"""Loss masks against fully rendered conversations, with a byte-level tokenizer and three kinds of templates."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime.utils.chat_template import template_messages as messages_of_templates
from slime.utils.errors import ConfigError, DataError
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from tests.unit.utils.family_templates import FAMILIES, WITHOUT_TOOLS, tokenizer_of

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|image_pad|>"]

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Adds a system block if there is none, with the tools; consecutive tool answers share one user turn.
WITH_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set head = messages[0].content %}{% else %}{% set head = 'Be good.' %}"
    "{% endif %}<|im_start|>system\n{{ head }}{% if tools %}\nTools: {{ tools | tojson }}{% endif %}<|im_end|>\n"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n[{{ m.content }}]"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif not (m.role == 'system' and loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Assistant turns after the last user message have a think block; earlier ones do not.
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and ns.last >= 0 %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = ["user\nassistant\nsystem\nWhat is 3 + 4?\n\nThe answer is 7.\nTools: []"] * 4


@pytest.fixture(scope="module")
def make_tokenizer():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)

    def make(template):
        own = Tokenizer.from_str(backend.to_str())
        return PreTrainedTokenizerFast(tokenizer_object=own, chat_template=template, eos_token="<|im_end|>")

    return make


def ask(text):
    return {"role": "user", "content": text}


def say(text, **more):
    return {"role": "assistant", "content": text, **more}


def tool(text):
    return {"role": "tool", "content": text}


def rendered(tokenizer, messages, tools=None):
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


CONVERSATIONS = {
    "one turn": ([ask("3+4?"), say("7")], ["7<|im_end|>\n"]),
    "two turns": ([ask("3+4?"), say("7"), ask("sure?"), say("Yes.\n\n")], ["7<|im_end|>\n", "Yes.\n\n<|im_end|>\n"]),
    "system first": ([{"role": "system", "content": "Brief."}, ask("a"), say("b")], ["b<|im_end|>\n"]),
    "system later": ([ask("a"), {"role": "system", "content": "Brief."}, say("b")], ["b<|im_end|>\n"]),
    "assistant first": ([say("hello"), ask("a"), say("b")], ["hello<|im_end|>\n", "b<|im_end|>\n"]),
    "untrained turn": ([ask("a"), say("b", step_loss_mask=0), ask("c"), say("d")], ["d<|im_end|>\n"]),
    "absent in parquet": ([ask("a"), say("b", step_loss_mask=None)], ["b<|im_end|>\n"]),
    "ends with the user": ([ask("a"), say("b"), ask("c")], ["b<|im_end|>\n"]),
    "newline content": ([ask("a"), say("\nb")], ["\nb<|im_end|>\n"]),
    "empty content": ([ask("a"), say("")], ["<|im_end|>\n"]),
}


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("template", [PLAIN, WITH_SYSTEM], ids=["plain", "with system"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_equal_the_full_rendering_and_the_mask_covers_what_the_assistant_says(
    make_tokenizer, kind, template, name
):
    messages, trained = CONVERSATIONS[name]
    tokenizer = make_tokenizer(template)
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(messages)
    assert ids == rendered(tokenizer, messages)
    assert len(mask) == len(ids)
    assert generator.get_text_from_loss_mask(ids, mask) == trained


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
def test_tools_stand_at_the_head_and_neighbouring_tool_answers_in_one_turn(make_tokenizer, kind):
    tokenizer = make_tokenizer(WITH_SYSTEM)
    tools = [{"type": "function", "function": {"name": "add"}}]
    messages = [ask("3+4?"), say("call add"), tool("7"), tool("8"), say("7")]
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(messages, tools=tools)
    assert ids == rendered(tokenizer, messages, tools)
    assert generator.get_text_from_loss_mask(ids, mask) == ["call add<|im_end|>\n", "7<|im_end|>\n"]


def test_qwen3_keeps_the_thinking_of_every_turn(make_tokenizer):
    tokenizer = make_tokenizer(THINKING)
    messages = [ask("a"), say("b", reasoning_content="hm"), ask("c"), say("d")]
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen3")
    ids, mask = generator.get_loss_mask(messages)
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nd<|im_end|>\n"
    )
    assert generator.get_text_from_loss_mask(ids, mask) == [
        "<think>\nhm\n</think>\n\nb<|im_end|>\n",
        "<think>\n\n</think>\n\nd<|im_end|>\n",
    ]


def test_qwen3_5_renders_once_and_does_not_train_the_opening_of_the_thinking(make_tokenizer):
    tokenizer = make_tokenizer(THINKING)
    messages = [ask("a"), say("b"), ask("c"), say("d", reasoning_content="hm")]
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen3_5")
    ids, mask = generator.get_loss_mask(messages)
    assert ids == rendered(tokenizer, messages)
    assert generator.get_text_from_loss_mask(ids, mask) == ["b<|im_end|>\n", "hm\n</think>\n\nd<|im_end|>\n"]


def test_distill_trains_the_last_message_only(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    generator = MultiTurnLossMaskGenerator(tokenizer, "distill_qwen")
    ids, mask = generator.get_loss_mask([ask("a"), say("b c")])
    assert tokenizer.decode(ids) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb c"
    assert generator.get_text_from_loss_mask(ids, mask) == ["b c"]
    assert sum(generator.get_loss_mask([ask("a"), say("b", step_loss_mask=0)])[1]) == 0


def test_masks_are_aligned_to_ids_in_which_images_were_expanded(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN)
    messages = [
        {"role": "user", "content": [{"type": "image", "image": "x.png"}, {"type": "text", "text": "7"}]},
        say("7", step_loss_mask=0),
        ask("sure?"),
        say("7"),
    ]
    expanded = tokenizer(
        "<|im_start|>user\n<|image_pad|><|image_pad|>7<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n",
        add_special_tokens=False,
    )["input_ids"]
    for kind in ("qwen", "qwen3", "qwen3_5"):
        generator = MultiTurnLossMaskGenerator(tokenizer, kind)
        ids, mask = generator.get_loss_mask_with_multimodal_alignment(messages, expanded)
        assert ids == expanded
        tail = tokenizer("7<|im_end|>\n", add_special_tokens=False)["input_ids"]
        assert mask == [0] * (len(ids) - len(tail)) + [1] * len(tail)
    with pytest.raises(DataError, match="is not in the input ids"):
        generator.get_loss_mask_with_multimodal_alignment(messages, expanded[:-1])


def test_an_unknown_type_and_an_empty_conversation_are_refused(make_tokenizer):
    with pytest.raises(ConfigError, match="--loss-mask-type is 'llama'; it must be one of qwen, qwen3"):
        MultiTurnLossMaskGenerator(make_tokenizer(PLAIN), "llama")
    with pytest.raises(DataError, match="without messages"):
        MultiTurnLossMaskGenerator(make_tokenizer(PLAIN)).get_loss_mask([])


# --loss-mask-type any, with templates of every family

BRIEF = {"role": "system", "content": "Be brief."}


def conversation(name):
    """A conversation with a call and an answer without one; and the assistant's text in it."""
    asked = [BRIEF, ask("2+3?")] if name != "mistral" else [ask("2+3?")]
    if name in WITHOUT_TOOLS:
        return [*asked, say("Five."), ask("Sure?"), say("Yes.")], ["Five.", "Yes."]
    call = {"id": "a12345678", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    result = {"role": "tool", "name": "add", "tool_call_id": "a12345678", "content": "5"}
    turns = [say("", tool_calls=[call]), result, say("Five."), ask("Sure?"), say("Yes.")]
    return [*asked, *turns], ["3", "Five.", "Yes."]


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "add"}}]], ids=["", "tools"])
@pytest.mark.parametrize("name", FAMILIES)
def test_any_trains_what_the_assistant_says_and_what_ends_it_with_every_family(name, tools):
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    messages, said = conversation(name)
    generator = MultiTurnLossMaskGenerator(tokenizer, "any")
    ids, mask = generator.get_loss_mask(messages, tools)
    text = tokenizer.apply_chat_template(messages_of_templates(messages), tools=tools, tokenize=False)
    eos = tokenizer.eos_token if name.startswith("glm") else ""  # nothing follows the last turn
    assert tokenizer.decode(ids) == text + eos
    trained = generator.get_text_from_loss_mask(ids, mask)
    assert len(trained) == len(said)
    for part, words in zip(trained, said, strict=True):
        assert words in part and "Sure?" not in part and "2+3?" not in part and "Be brief" not in part
        assert part.endswith(tuple(family.special)) and not part.startswith(tuple(family.special[1:3]))
    ends = {
        "glm4": ["<|observation|>", "<|user|>", "<|endoftext|>"],
        "glm4.5": ["<|observation|>", "<|user|>", "<|endoftext|>"],
        "gpt-oss": ["<|call|>", "<|end|>", "<|return|>"],
    }.get(name, [family.end] * len(said))
    assert all(part.endswith(end) for part, end in zip(trained, ends, strict=True))


def test_any_trains_the_reasoning_that_the_template_shows_and_not_what_a_prompt_has_written():
    messages = [ask("a"), say("b", reasoning_content="old"), ask("c"), say("d", reasoning_content="hm")]

    def trained(name, **kwargs):
        generator = MultiTurnLossMaskGenerator(tokenizer_of(name), "any", template_kwargs=kwargs)
        return generator.get_text_from_loss_mask(*generator.get_loss_mask(messages))

    assert trained("qwen3") == ["b<|im_end|>", "<think>\nhm\n</think>\n\nd<|im_end|>"]
    assert trained("qwen3.5") == ["b<|im_end|>", "hm\n</think>\n\nd<|im_end|>"]
    messages[3].pop("reasoning_content")
    assert trained("qwen3", enable_thinking=False) == ["b<|im_end|>", "d<|im_end|>"]
    assert trained("qwen3") == ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]


def test_a_type_that_trains_no_end_of_a_turn_says_so_once(caplog):
    generator = MultiTurnLossMaskGenerator(tokenizer_of("glm4"), "qwen")
    for _ in range(2):
        generator.get_loss_mask([ask("a"), say("b")])
    [warning] = [one for one in caplog.messages if "the model does not learn to stop" in one]
    assert "--loss-mask-type qwen" in warning and "--loss-mask-type any" in warning
    caplog.clear()
    MultiTurnLossMaskGenerator(tokenizer_of("glm4"), "any").get_loss_mask([ask("a"), say("b")])
    assert not caplog.messages
