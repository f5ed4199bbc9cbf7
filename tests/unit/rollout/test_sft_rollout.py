"""Conversations as finished rollouts."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime.rollout import sft_rollout
from slime.utils.errors import DataError
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

WORDS = ["<|im_start|>", "<|im_end|>", "user", "assistant", "a", "b", "c", "d"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)

CONTENT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ 'd' if p.type == 'image' else p.text }} {% endfor %}{% endif %}"
)


@pytest.fixture
def args(tmp_path):
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<|im_end|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE).save_pretrained(tmp_path)
    return Namespace(n_samples_per_prompt=1, rollout_batch_size=2, hf_checkpoint=str(tmp_path), loss_mask_type="qwen")


class Source:
    def __init__(self, *prompts):
        self.prompts = prompts

    def get_samples(self, num):
        assert num == 2
        return [[Sample(index=index, prompt=prompt)] for index, prompt in enumerate(self.prompts)]


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def test_a_conversation_becomes_a_finished_sample_from_its_first_trained_token_on(args):
    one = [turn("user", "a"), turn("assistant", "b")]
    two = [*one, turn("user", "c"), turn("assistant", "d")]
    groups = sft_rollout.generate_rollout(args, 0, Source(one, two))
    [[short], [long]] = groups
    # <im_start> user a <im_end> <im_start> assistant | b <im_end>
    assert short.tokens == [0, 2, 4, 1, 0, 3, 5, 1]
    assert (short.response_length, short.loss_mask) == (2, [1, 1])
    # ... b <im_end> | <im_start> user c <im_end> <im_start> assistant | d <im_end>
    assert long.tokens == [0, 2, 4, 1, 0, 3, 5, 1, 0, 2, 6, 1, 0, 3, 7, 1]
    assert (long.response_length, long.loss_mask) == (10, [1, 1, 0, 0, 0, 0, 0, 0, 1, 1])
    assert (long.reward, long.status) == (0, Sample.Status.COMPLETED)


def test_images_are_tokens_that_are_not_trained(args, monkeypatch):
    def processor(text, images, **kwargs):
        assert images == ["picture"] and text.split()[2] == "d"
        words = [word for part in text.split() for word in (["d"] * 3 if part == "d" else [part])]
        return {"input_ids": [[WORDS.index(word) for word in words]], "pixel_values": "pixels"}

    monkeypatch.setattr(sft_rollout, "load_processor", lambda *_, **__: processor)
    template = TEMPLATE.replace("{{ m.content }}", CONTENT)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.hf_checkpoint, chat_template=template)
    tokenizer.save_pretrained(args.hf_checkpoint)
    question = [{"type": "image", "image": "x"}, {"type": "text", "text": "a"}]
    sample = Sample(
        prompt=[turn("user", question), turn("assistant", "b")], multimodal_inputs={"images": ["picture"]}, index=0
    )
    source = SimpleNamespace(get_samples=lambda num: [[sample]])
    sft_rollout.generate_rollout(args, 0, source)
    # <im_start> user (image: d d d) a <im_end> <im_start> assistant | b <im_end>
    assert sample.tokens == [0, 2, 7, 7, 7, 4, 1, 0, 3, 5, 1]
    assert (sample.response_length, sample.loss_mask) == (2, [1, 1])
    assert sample.multimodal_train_inputs == {"pixel_values": "pixels"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a", "Sample 0 has a prompt of text; sft_rollout needs messages"),
        ([turn("user", "a")], r"Sample 0 has no token to train.*roles are \['user'\]"),
        ([turn("user", "a"), turn("assistant", "b", step_loss_mask=0)], "Sample 0 has no token to train"),
    ],
)
def test_rows_that_train_nothing_are_refused(args, prompt, message):
    with pytest.raises(DataError, match=message):
        sft_rollout.generate_rollout(args, 0, Source(prompt, prompt))


def test_arguments_of_the_template_hold_for_the_conversation(args, tmp_path):
    template = "{% if brief %}d {% endif %}" + TEMPLATE
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "other")
    args.hf_checkpoint, args.apply_chat_template_kwargs = str(tmp_path / "other"), {"brief": True}
    one = [turn("user", "a"), turn("assistant", "b")]
    args.loss_mask_type = "any"
    groups = sft_rollout.generate_rollout(args, 0, Source(one, one))
    assert tokenizer.decode(groups[0][0].tokens).startswith("d <|im_start|> user")
