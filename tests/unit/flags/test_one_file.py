"""Adding a flag changes one file: CONTRIBUTING.md's example, applied to a copy of ``slime/flags/reward.py``."""

from __future__ import annotations

import pytest

from tests.contracts.copied_tree import copy_by_links, printed_by, with_edits
from tests.contracts.source_tree import REPO

pytestmark = pytest.mark.timeout(300)  # starts a Python with torch, perhaps on a busy machine

EDITS = {
    # a line of the file -> what to insert before it
    '    group.add_argument("--rm-url"': """\
    group.add_argument(
        "--rm-patience-s", type=wait_s, help="Seconds a grader may think. Default: a tenth."
    )
""",
    "    rm_timeout_s: float": """\
    rm_patience_s: float | None
""",
    "    if args.eval_reward_key is None:": """\
    if args.rm_patience_s is None:
        args.rm_patience_s = args.rm_timeout_s / 10
""",
    '    asked = [("--rm-type", args)]': """\
    if args.rm_patience_s > args.rm_timeout_s:
        yield f"--rm-patience-s {args.rm_patience_s:g} is above --rm-timeout-s {args.rm_timeout_s:g}; lower it."
""",
}
"""The flag is declared, passed on, derived and checked."""
PROGRAM = """
import json, sys
from argparse import Namespace
from slime.flags.parse import GROUPS
from slime.flags.group import derive_all, problems_of
from slime.flags.parser import Parser
from slime.flags.reward import RewardConfig
from slime.utils.errors import ConfigError

parser = Parser(GROUPS)
megatron = dict(bf16=False, fp16=False, ckpt_step=None, no_load_optim=False, no_load_rng=False, finetune=False)

def complete(*words):
    words = ["--num-rollout", "1", "--rollout-batch-size", "1", *words]
    args = parser.parse_args(words, namespace=Namespace(**megatron))
    args.critic_args = None
    derive_all(args, GROUPS)
    return args

wrong = complete("--rm-patience-s", "900")
action = next(a for a in parser._actions if a.dest == "rm_patience_s")
print(json.dumps({
    "documented": action.help,
    "parsed": complete("--rm-patience-s", "7").rm_patience_s,
    "derived": complete("--rm-timeout-s", "50").rm_patience_s,
    "checked": [message for message in problems_of(wrong, GROUPS) if "patience" in message],
    "config": RewardConfig.of(complete("--rm-patience-s", "7")).rm_patience_s,
    "config of a small namespace": RewardConfig.of(Namespace(rm_type="math")).rm_patience_s,
}))
"""


def test_a_flag_is_parsed_derived_checked_documented_and_handed_on_by_one_file(tmp_path):
    edited = REPO / "slime/flags/reward.py"
    copy_by_links(REPO / "slime", tmp_path / "slime", {edited})
    (tmp_path / "slime/flags/reward.py").write_text(with_edits(edited.read_text(), EDITS))
    assert printed_by(PROGRAM, tmp_path) == {
        "documented": "Seconds a grader may think. Default: a tenth.",
        "parsed": 7.0,
        "derived": 5.0,
        "checked": ["--rm-patience-s 900 is above --rm-timeout-s 600; lower it."],
        "config": 7.0,
        "config of a small namespace": None,
    }
