"""Measures the accuracy of a Hugging Face folder on the held-out prompts with transformers' ``generate``.

    python examples/tiny_arithmetic/hf_accuracy.py --hf runs/tiny/sft/hf --data runs/tiny/task/data/eval.jsonl

It needs neither engine nor trainer, so it is an independent check of an exported model.  With ``--fit-for-grpo`` the
exit code is 1 if the model is not a suitable warm start: too good or too bad, guesses well above chance, or a share of
worked answers that is too low or too high.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny_arithmetic.reward import grade  # noqa: E402
from examples.tiny_arithmetic.tokenizer import END  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class Accuracy:
    """Fractions of right answers, in [0, 1]."""

    overall: float
    worked: float
    """Among answers that show running sums."""
    guessed: float
    """Among answers that box a digit immediately."""
    worked_share: float
    """Fraction of answers that show running sums."""

    def why_unfit(self) -> str | None:
        """Return why GRPO should not start from this model; None if it may."""
        if not 0.15 <= self.overall <= 0.65:
            return f"{self.overall:.0%} right, but a weak policy is 15-65 % right"
        if self.guessed > 0.25:
            return f"guesses are {self.guessed:.0%} right, so that guessing pays and working need not be learned"
        if not 0.15 <= self.worked_share <= 0.85:
            return f"{self.worked_share:.0%} of the answers are worked: one of the two ways is hardly ever tried"
        return None


def _share(grades: list[float]) -> float:
    return sum(grades) / len(grades) if grades else 0.0


def measure(hf_folder: Path, data: Path, *, greedy: bool, seed: int) -> Accuracy:
    """Answer every prompt of ``data`` once, at temperature 1 or greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(hf_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        for row in rows
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        outputs = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **sampling)
    grades: dict[str, list[float]] = {"worked": [], "guessed": []}
    for row, output in zip(rows, outputs, strict=True):
        text = tokenizer.decode(output[inputs["input_ids"].shape[1] :]).removesuffix(tokenizer.pad_token)
        text, is_finished = text.split(END)[0], END in text
        status = Sample.Status.COMPLETED if is_finished else Sample.Status.TRUNCATED
        sample = Sample(response=text, label=row["label"], status=status)
        grades["guessed" if text.startswith("\\boxed") else "worked"].append(grade(sample))
    return Accuracy(
        overall=_share(grades["worked"] + grades["guessed"]),
        worked=_share(grades["worked"]),
        guessed=_share(grades["guessed"]),
        worked_share=len(grades["worked"]) / len(rows),
    )


def main() -> None:
    """Run the command line."""
    from slime.backends.sglang_utils import cpu_shim

    cpu_shim.install()  # transformers cannot import its models with a torchvision that does not match torch
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="jsonl file of prompts and labels")
    parser.add_argument("--greedy", action="store_true", help="take the most likely token instead of sampling")
    parser.add_argument("--seed", type=int, default=1, help="of the sampling")
    parser.add_argument(
        "--fit-for-grpo", action="store_true", help="exit with code 1 if it is not a suitable warm start"
    )
    options = parser.parse_args()
    for path in (options.hf / "config.json", options.data):
        if not path.is_file():
            parser.error(f"there is no file {path}")
    accuracy = measure(options.hf, options.data, greedy=options.greedy, seed=options.seed)
    print(
        f"{options.hf}: {accuracy.overall:.1%} right on held-out prompts; {accuracy.worked_share:.0%} worked "
        f"({accuracy.worked:.0%} of them right), the rest guessed ({accuracy.guessed:.0%} right)"
    )
    reason = accuracy.why_unfit() if options.fit_for_grpo else None
    if reason is not None:
        sys.exit(
            f"{options.hf} is not a suitable warm start: {reason}. Create another one with another seed of the task."
        )


if __name__ == "__main__":
    main()
