"""Realistic surroundings for a plug-in: parsed flags, a data file, an engine, and samples as a rollout makes them."""

from __future__ import annotations

import copy
import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from slime.compose import flag_groups
from slime.flags.parse import backend_checks, build_parser, record_runtime, slime_validate_args
from slime.flags.words import refuse_unknown
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.async_utils import run
from slime.utils.http_utils import close_http_client, init_http_client
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample
from tools.plugin_check.engine import DEFAULT_ANSWERS, AnsweringEngine
from tools.plugin_check.model_folder import write_model

NUM_PROMPTS = 6
GROUP_SIZE = 4
TINY_MODEL = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 16 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 10000
--use-rotary-position-embeddings --disable-bias-linear --qk-layernorm --vocab-size 512
--untie-embeddings-and-output-weights --fp32""".split()


class Bench:
    """Where plug-ins are tried.

    Args of the constructor: a scratch folder; further flags of ``train.py`` that the plug-in needs; a tokenizer's
    folder in place of the byte-level one; the texts that the engine answers in turn; seconds that a call may take.
    """

    def __init__(
        self,
        folder: Path,
        flags: Sequence[str] = (),
        *,
        hf_checkpoint: str | None = None,
        answers: Sequence[str] = (),
        timeout_s: float = 60.0,
    ) -> None:
        self.folder = folder
        self.flags = list(flags)
        self.timeout_s = timeout_s
        self._checkpoint = hf_checkpoint
        self._is_own = hf_checkpoint is None
        self._answers = answers or DEFAULT_ANSWERS
        self._tokenizer: Any = None

    @property
    def checkpoint(self) -> str:
        """The folder of the model."""
        if self._checkpoint is None:
            self._checkpoint = str(write_model(self.folder / "model"))
        return self._checkpoint

    @property
    def tokenizer(self) -> Any:
        """The model's; that of the folder made here without transformers, which takes seconds to import."""
        if self._tokenizer is None:
            if self._is_own:
                self._tokenizer = Tokenizer.from_file(str(Path(self.checkpoint, "tokenizer.json")))
            else:
                self._tokenizer = load_tokenizer(self.checkpoint, trust_remote_code=True)
        return self._tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens.ids if self._is_own else tokens  # type: ignore[no-any-return]

    def args(self, *flags: str, trainer: bool = False, engine: bool = True) -> Namespace:
        """Return a complete Namespace, from the flags of a small run, those of the user, and ``flags``.

        Args:
            trainer: of a job that trains; else of one that only generates.
            engine: with SGLang's flags, whose import takes seconds.

        Raises:
            SlimeError: what the start of a run would say about them.
        """
        prompts = self.folder / "prompts.jsonl"
        rows = [{"input": f"What is {i} + {5 - i}?", "label": "5", "metadata": {"row": i}} for i in range(NUM_PROMPTS)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [
            *("--hf-checkpoint", self.checkpoint, "--ref-load", self.checkpoint, "--save", str(self.folder / "save")),
            *("--prompt-data", str(prompts), "--label-key", "label", "--rm-type", "math"),
            *("--eval-prompt-data", "sums", str(prompts)),
            *("--rollout-batch-size", "2", "--n-samples-per-prompt", str(GROUP_SIZE)),
            *("--rollout-max-response-len", "256", "--num-rollout", "2", "--num-steps-per-rollout", "1"),
            *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
            *([*TINY_MODEL, "--debug-train-only"] if trainer else ["--debug-rollout-only"]),
        ]
        words += [*self.flags, *flags]
        has_engine = not trainer and (engine or any(word.startswith(("--sglang-", "--router-")) for word in words))
        parser = build_parser(with_engine_flags=has_engine, groups=flag_groups())
        args, unknown = parser.parse_known_args(words)
        refuse_unknown(parser, words, unknown)
        slime_validate_args(args, parser)
        for check in backend_checks(args, parser.groups) if trainer or has_engine else ():
            check(args)
        return args

    @contextmanager
    def engine(self, args: Namespace) -> Iterator[AnsweringEngine]:
        """An engine at the router's address of ``args``, with slime's client to reach it."""
        with AnsweringEngine(self.encode, self.tokenizer.decode, self._answers) as engine:
            address = ("127.0.0.1", engine.port)
            record_runtime(
                args,
                sglang_router_ip=address[0],
                sglang_router_port=address[1],
                sglang_model_routers={"default": address},
            )
            init_http_client(args)
            GenerateState.clear_instances()
            GenerateState(args)  # imports transformers, which takes seconds
            try:
                yield engine
            finally:
                run(close_http_client())
                GenerateState.clear_instances()

    def sample(
        self, index: int, text: str | None = None, *, reward: Any = None, group_size: int = GROUP_SIZE
    ) -> Sample:
        """A finished sample as the built-in generate leaves it."""
        prompt = f"What is {index % 5} + {5 - index % 5}?"
        prompt_ids = self.encode(prompt)
        text = self._answers[index % len(self._answers)] if text is None else text
        ids = self.encode(text)
        return Sample(
            group_index=index // GROUP_SIZE,
            index=index,
            prompt=prompt,
            tokens=prompt_ids + ids,
            response=text,
            response_length=len(ids),
            label="5",
            loss_mask=[1] * len(ids),
            weight_versions=["1"],
            rollout_log_probs=[-0.5] * len(ids),
            status=Sample.Status.COMPLETED,
            metadata={"row": index},
            session_id=f"session-{index}",
        )

    def groups(self, args: Namespace, num_groups: int, *, equal: bool = False) -> list[list[Sample]]:
        """Graded groups; ``equal`` ones have one reward for all their samples."""
        samples = [self.sample(i) for i in range(num_groups * GROUP_SIZE)]
        for sample in samples:
            number = 1.0 if equal else float(sample.index % 2)
            keys = {key for key in (args.reward_key, args.eval_reward_key) if key}
            sample.reward = dict.fromkeys(keys, number) if keys else number
        return [samples[i * GROUP_SIZE : (i + 1) * GROUP_SIZE] for i in range(num_groups)]


def fanned_out(group: list[Sample]) -> list[list[Sample]]:
    """The group as a generate function leaves it that makes two samples of each execution."""
    entries = []
    for sample in group:
        sample.rollout_id = sample.index
        entries.append([sample, copy.deepcopy(sample)])
    return entries
