"""Several data sets as one stream: shares, schedules, skipped prompts, and a restart."""

import json
from argparse import Namespace
from collections import Counter

import pytest

from slime.ext.environments.flags import MIXED_SOURCE, check_mixture, derive_mixture, read_mix
from slime.ext.environments.mixture import MixedDataSource
from slime.rollout import data_source as data_source_module
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.run_state import RunState, use_run
from slime.utils.errors import ConfigError, DataError
from slime.utils.types import Sample
from tests.flag_values import args_with
from tests.unit.rollout.test_data_source import make_args  # noqa: F401  a fixture

SIZES = {"a": 4, "b": 10}


@pytest.fixture
def open_source(tmp_path, monkeypatch):
    """``open_source(weights, curriculum)``: the data source of a mixture of a4 and b10."""
    monkeypatch.setattr(data_source_module, "load_tokenizer", lambda *_, **__: None)
    monkeypatch.setattr(data_source_module, "load_processor", lambda *_, **__: None)
    for name, size in SIZES.items():
        rows = [{"input": f"{name}{i}", "answer": i} for i in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(a=1, b=1, curriculum=None, shuffle=False, **values):
        use_run(RunState())
        sources = [{"path": str(tmp_path / f"{n}.jsonl"), "name": n, "weight": w} for n, w in (("a", a), ("b", b))]
        mix = {"datasets": sources} | ({"curriculum": curriculum} if curriculum is not None else {})
        (tmp_path / "mix.yaml").write_text(json.dumps(mix).replace('"0":', "0:").replace('"10":', "10:"))
        given = {
            "prompt_data": str(tmp_path / "mix.yaml"), "hf_checkpoint": "unused", "label_key": "answer",
            "apply_chat_template": False, "rollout_shuffle": shuffle, "n_samples_per_prompt": 2,
            "save": str(tmp_path / "run"), "load": str(tmp_path / "run"),
        }  # fmt: skip
        return MixedDataSource(args_with(**given | values))

    yield make
    use_run(RunState())


def taken(source, count):
    return [group[0].prompt for group in source.get_samples(count)]


def shares(prompts):
    return Counter(prompt[0] for prompt in prompts)


def solve(source, rewards, count):
    """Draw ``count`` prompts one by one, each with the rewards from ``rewards``."""
    prompts = []
    for _ in range(count):
        [group] = source.get_samples(1)
        for sample, reward in zip(group, rewards(group[0].prompt), strict=True):
            sample.reward = reward
        source.dataset.finished(group)
        prompts.append(group[0].prompt)
    return prompts


def test_every_stretch_of_the_stream_has_the_shares_of_the_weights(open_source):
    prompts = taken(open_source(a=3, b=1), 40)
    assert shares(prompts) == {"a": 30, "b": 10}
    assert all(shares(prompts[start : start + 4]) == {"a": 3, "b": 1} for start in range(0, 40, 4))
    assert [p for p in prompts if p[0] == "a"][:6] == ["a0", "a1", "a2", "a3", "a0", "a1"]
    assert [p for p in prompts if p[0] == "b"] == [f"b{i}" for i in range(10)]


def test_a_schedule_goes_from_weight_to_weight_over_the_prompts_taken(open_source):
    prompts = taken(open_source(a={0: 1, 10: 0}, b={0: 0, 10: 1}), 30)
    assert shares(prompts[:10]) == {"a": 5, "b": 5} and shares(prompts[:4])["a"] >= 3
    assert shares(prompts[10:]) == {"b": 20}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("stop", [1, 7, 23])
def test_a_restart_goes_on_with_the_next_prompt(open_source, shuffle, stop):
    settings = {"a": 2, "b": {0: 1, 10: 3}, "shuffle": shuffle, "curriculum": {"skip_epochs": 1}}
    rewards = {f"{n}{i}": (i % 3 > 0, i % 3 > 1) for n, size in SIZES.items() for i in range(size)}.__getitem__
    whole = open_source(**settings)
    prompts = solve(whole, rewards, 60)
    first = open_source(**settings)
    solve(first, rewards, stop)
    first.save(0)
    second = open_source(**settings, start_rollout_id=1)
    second.load()
    assert solve(second, rewards, 60 - stop) == prompts[stop:]
    assert second.state_dict() == whole.state_dict()


def test_prompts_that_are_always_or_never_solved_are_left_out_for_some_epochs(open_source):
    source = open_source(a=1, b=0, curriculum={"skip_epochs": 2})
    rewards = {"a0": (1, 1), "a1": (0, 0.5), "a2": (0, 1), "a3": (1, 0)}.__getitem__
    assert solve(source, rewards, 10) == ["a0", "a1", "a2", "a3", "a2", "a3", "a2", "a3", "a0", "a1"]
    metrics = source.dataset.take_metrics()
    assert metrics["rollout/mixture/a/prompts"] == 10 and metrics["rollout/mixture/a/left_out"] == 4
    assert metrics["rollout/mixture/a/waiting"] == 2
    assert metrics["rollout/mixture/a/pass_rate"] == pytest.approx((2 * 1 + 6 * 0.5) / 10)
    assert "rollout/mixture/b/pass_rate" not in metrics
    assert source.dataset.take_metrics()["rollout/mixture/a/prompts"] == 0


def test_an_answer_that_was_not_graded_says_nothing_about_its_prompt(open_source):
    source = open_source(a=1, b=0, curriculum={"skip_epochs": 2}).dataset
    first, second = [Sample(reward=1.0, metadata={"source_name": "a", "source_row": 0}) for _ in range(2)]
    second.reward, second.status, second.remove_sample = 0.0, Sample.Status.FAILED, True
    source.finished([first, second])
    assert source.take_metrics()["rollout/mixture/a/pass_rate"] == 1.0
    source.finished([second])
    assert "rollout/mixture/a/pass_rate" not in source.take_metrics()


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_in_which_every_prompt_is_left_out_are_passed_over_at_once(open_source, monkeypatch, shuffle):
    rewards = {"a0": (1, 1), "a1": (0, 0), "a2": (1, 0), "a3": (1, 1)}
    seen = []
    for jumps in (True, False):
        source = open_source(a=1, b=0, shuffle=shuffle, curriculum={"skip_epochs": 5})
        mixed, dataset = source.dataset._by_name["a"], source.dataset._by_name["a"].dataset
        if not jumps:
            monkeypatch.setattr(source.dataset, "_next_epoch", lambda source: source.position["epoch"] + 1)
        prompts = solve(source, rewards.__getitem__, 9)  # a2 comes in every epoch, until it is solved too
        prompts += solve(source, lambda prompt: (1, 1), 12)
        order = [sample.prompt for sample in dataset.samples]
        seen.append((prompts, mixed.position, mixed.due, source.dataset.take_metrics(), order))
    assert seen[0] == seen[1]

    source = open_source(a=1, b=0, shuffle=shuffle, curriculum={"skip_epochs": 10**9})
    solve(source, lambda prompt: (1, 1), 4)
    shuffled = []
    monkeypatch.setattr(source.dataset._by_name["a"].dataset, "shuffle", shuffled.append)
    assert shares(taken(source, 1)) == {"a": 1}
    assert shuffled == [10**9 + 1] * shuffle


def test_the_mixture_sees_the_groups_of_the_run(open_source):
    source = open_source()
    assert source.observers == (source.dataset,)


def test_other_data_is_refused_and_other_weights_are_not(open_source, tmp_path):
    source = open_source()
    source.get_samples(3)
    state = source.state_dict()
    open_source(a=5).load_state_dict(state)
    (tmp_path / "a.jsonl").write_text('{"input": "other", "answer": 1}\n')
    again = MixedDataSource(source.args)
    with pytest.raises(DataError, match="--accept-other-data"):
        again.load_state_dict(state)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "write 'datasets:'"),
        ("datasets: []", "write 'datasets:'"),
        ("datasets: [{path: a.jsonl}]\nother: 1", "write 'datasets:'"),
        ("datasets: [{name: a}]", "a data set has path"),
        ("datasets: [{path: a.jsonl, wieght: 1}]", "a data set has path, and maybe name, weight"),
        ("datasets: [{path: a.jsonl, weight: -1}]", "weight is -1"),
        ("datasets: [{path: a.jsonl, weight: {soon: 1}}]", "weight is"),
        *(
            (f"datasets: [{{path: a.jsonl, weight: {weight}}}]", "weight is")
            for weight in ("true", ".inf", "null", "[1]", "{0: 1, later: 2}", "{0: .nan}")
        ),
        *(
            (f"datasets: [{{path: a.jsonl, {key}: {value}}}]", f"{key} is .*; it is a text, or is left out")
            for key in ("name", "input_key")
            for value in ("null", "5", "''", "[a]", "{a: 1}")
        ),
        *((f"datasets: [{{path: {path}}}]", "path is .*; it is a text") for path in ("null", "5", "''", "[a.jsonl]")),
        *(
            (f"datasets: [{{path: a.jsonl}}]\ncurriculum: {{{entry}}}", message)
            for entry, message in (
                ("low: .nan", "it has numbers"),
                ("solved: .inf", "it has numbers"),
                ("skip_epochs: true", "it has numbers"),
                ("skip_epochs: -1", "skip_epochs a whole number from 0 on"),
                ("skip_epochs: 1.5", "skip_epochs a whole number from 0 on"),
                ("low: 1, high: 0", "low must be below high"),
            )
        ),
        ("datasets: [{path: a.jsonl}, {path: a.jsonl}]", "two data sets are named alike"),
        ("datasets: [{path: a.jsonl}]\ncurriculum: {hgih: 1}", "it has numbers: solved, low, high, skip_epochs"),
    ],
)
def test_a_wrong_file_is_refused_with_what_it_says(tmp_path, text, message):
    (tmp_path / "mix.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_mix(str(tmp_path / "mix.yaml"))


def given(tmp_path, **values):
    (tmp_path / "mix.yaml").write_text("datasets: [{path: a.jsonl, weight: {5: 0, 0: 2}}]")
    defaults = dict(
        prompt_data=str(tmp_path / "mix.yaml"), prompt_sources=[{}], runs_here=True, rollout_global_dataset=True,
        data_source_path="slime.rollout.data_source.RolloutDataSourceWithBuffer",
    )  # fmt: skip
    return Namespace(**defaults | values)


def test_a_mixture_is_read_by_its_own_data_source(tmp_path):
    args = given(tmp_path)
    derive_mixture(args)
    assert args.data_source_path == MIXED_SOURCE and list(check_mixture(args)) == []
    assert args.prompt_sources == [{"path": "a.jsonl", "name": "a.jsonl", "weight": [(0, 2), (5, 0)]}]


class OwnMixedSource(MixedDataSource):
    pass


class OwnSource(RolloutDataSourceWithBuffer):
    pass


@pytest.mark.parametrize(("source", "reads"), [(OwnMixedSource, True), (OwnSource, False)])
def test_a_users_data_source_reads_a_mixture_where_it_extends_the_one_that_does(tmp_path, source, reads):
    args = given(tmp_path, data_source_path=f"{__name__}.{source.__name__}")
    derive_mixture(args)
    assert args.data_source_path.endswith(source.__name__)
    assert [f"derive it from {MIXED_SOURCE}" in message for message in check_mixture(args)] == [True] * (not reads)


def test_of_several_data_sets_the_one_with_other_rows_is_named_and_their_order_counts(make_args, tmp_path):  # noqa: F811
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"input": name, "metadata": {"level": 1}}) + "\n")

    def mix(*names):
        lines = [f"  - {{name: {name}, path: {tmp_path}/{name}.jsonl}}\n" for name in names]
        (tmp_path / "mix.yaml").write_text("datasets:\n" + "".join(lines))
        return make_args(prompt_data=str(tmp_path / "mix.yaml"), reward_key=None)

    source = MixedDataSource(mix("a", "b"))
    source.get_samples(3)
    source.save(0)
    MixedDataSource(mix("a", "b")).load(0)
    with pytest.raises(DataError, match="--prompt-data lists the data sets b, a, before a, b"):
        MixedDataSource(mix("b", "a")).load(0)
    with pytest.raises(DataError, match="--prompt-data lists the data sets a, before a, b"):
        MixedDataSource(mix("a")).load(0)
    (tmp_path / "b.jsonl").write_text(json.dumps({"input": "b", "metadata": {"level": 2}}) + "\n")
    with pytest.raises(
        DataError, match="data set b of --prompt-data has other rows: metadata changed, first in row 1"
    ):
        MixedDataSource(mix("a", "b")).load(0)


def test_the_home_folder_may_be_named_in_a_mixture(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "mix.yaml").write_text("datasets: [{path: ~/a.jsonl}]")
    [source] = read_mix(str(tmp_path / "mix.yaml")).sources
    assert (source["path"], source["name"]) == ("/home/me/a.jsonl", "~/a.jsonl")
