"""The workload of both frameworks: a model folder with random weights, prompts, and the length of each response.

Both read one file of prompts; each row has the lengths of its samples, which both sides' hooks force.
"""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.published_configs import PUBLISHED

TINY = PUBLISHED["qwen3-0.6B"] | {
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
"""For a CPU."""
SHAPES = {"qwen3-0.6B": PUBLISHED["qwen3-0.6B"], "qwen3-1.7B": PUBLISHED["qwen3-1.7B"], "tiny": TINY}
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def response_length(prompt: int, sample: int, options: Namespace) -> int:
    """Return the length of one response: log-normal, of ``options.median`` and ``sigma``, up to ``options.cap``."""
    drawn = options.median * random.Random(1_000_003 * prompt + sample).lognormvariate(0.0, options.sigma)
    return max(min(16, options.cap), min(options.cap, int(drawn)))


def forced_length(row: dict[str, Any], sample: int) -> int:
    """Return the length of a sample in a row's ``extra_info``."""
    return int(row["lengths"].split()[sample])


def score(text: str) -> float:
    """Return a reward that costs nothing and differs between the samples of a prompt."""
    return float(len(text) % 2)


def prompts(count: int) -> Iterator[str]:
    """Draw texts of 85 to 170 characters, one token each."""
    draw = random.Random(7)
    words = ["".join(draw.choices(LETTERS, k=draw.randint(2, 7))) for _ in range(500)]
    for _ in range(count):
        size, text = draw.randint(85, 165), ""
        while len(text) < size:
            text += draw.choice(words) + " "
        yield text.strip()


def build_tokenizer(size: int) -> Any:
    """Return a byte-level tokenizer of ``size`` entries without merges; entries beyond the bytes are short words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = sorted(pre_tokenizers.ByteLevel.alphabet())
    for number in range(size - 3 - len(entries)):
        entries.append("\u0120" + "".join(LETTERS[number // 26**place % 26] for place in range(4)))
    core = Tokenizer(models.BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=TEMPLATE,
    )


def write(folder: Path, options: Namespace) -> int:
    """Write ``folder/model`` and ``folder/prompts.jsonl``; return the mean response tokens of a step."""
    import torch
    import transformers

    shape = SHAPES[options.shape]
    tokenizer = build_tokenizer(shape["vocab_size"])
    assert len(tokenizer) == shape["vocab_size"], len(tokenizer)
    tokenizer.save_pretrained(folder / "model")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = transformers.AutoConfig.for_model(**{**shape, **ids, "max_position_embeddings": 40960})
    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    tokens = 0
    with (folder / "prompts.jsonl").open("w") as out:
        for index, text in enumerate(prompts(options.prompts * options.steps)):
            lengths = [response_length(index, sample, options) for sample in range(options.samples)]
            tokens += sum(lengths)
            row = {
                "prompt": [{"role": "user", "content": text}],
                "label": "",
                "extra_info": {"split": "train", "index": index, "lengths": " ".join(map(str, lengths))},
                **{"data_source": "peers", "ability": "none"},
                "reward_model": {"style": "rule", "ground_truth": ""},
            }
            out.write(json.dumps(row) + "\n")
    return tokens // options.steps
