"""The critic's args: from the command line, from its overrides, and from its role."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.flags.checkpoint import TRACKER
from slime.flags.critic import check_critic_layout
from slime.flags.parse import record_runtime, slime_validate_args
from slime.utils.arguments import parse_megatron_role_args
from slime.utils.errors import ConfigError

PPO = ("--advantage-estimator", "ppo")


@pytest.fixture
def ppo(make_args, tmp_path):
    """Complete args of a PPO run with these words and these overrides of the critic (YAML flow style)."""

    def make(*words: str, critic: str = "", actor: str = ""):
        if critic or actor:
            entries = [(role, text) for role, text in (("actor", actor), ("critic", critic)) if text]
            text = "".join(f"  - {{name: {role}, role: {role}, overrides: {{{text}}}}}\n" for role, text in entries)
            (tmp_path / "roles.yaml").write_text(f"megatron:\n{text}")
            words = (*words, "--megatron-config-path", str(tmp_path / "roles.yaml"))
        args = make_args(*PPO, *words)
        slime_validate_args(args)
        return args

    return make


def save(folder: Path, iteration: int) -> str:
    """A folder with the files of a finished save."""
    (folder / f"iter_{iteration:07d}").mkdir(parents=True)
    (folder / f"iter_{iteration:07d}" / "metadata.json").touch()
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return str(folder)


def test_only_ppo_has_a_critic_and_its_trainers_sleep(make_args, ppo):
    grpo = make_args()
    slime_validate_args(grpo)
    assert grpo.critic_args is None and not grpo.offload_train
    args = ppo()
    assert args.use_critic and args.offload_train and args.critic_args.offload_train
    assert (args.critic_num_nodes, args.critic_num_gpus_per_node) == (1, 1)


def test_every_role_starts_from_the_command_line_and_has_overrides_of_its_own(ppo):
    args = ppo("--lr", "3e-6", actor="lr: 1e-6", critic="lr: '1e-5', value-clip: 1")
    assert (args.lr, args.critic_args.lr, args.critic_args.value_clip, args.value_clip) == (1e-6, 1e-5, 1, 0.2)
    assert ppo("--lr", "3e-6", actor="lr: 1e-6").critic_args.lr == 3e-6


def test_drivers_get_the_args_of_a_role(ppo, make_args, tmp_path):
    args = ppo("--lr", "3e-6", actor="lr: 1e-6", critic="lr: 1e-5, num-nodes: 2")
    path = args.megatron_config_path
    actor, critic = (parse_megatron_role_args(args, path, role) for role in ("actor", "critic"))
    assert (actor.lr, critic.lr, args.lr) == (1e-6, 1e-5, 1e-6)
    assert critic == args.critic_args and critic is not args.critic_args and actor is not args
    plain = make_args("--lr", "3e-6", "--kl-coef", "0.1")
    slime_validate_args(plain)
    assert parse_megatron_role_args(plain, None, "actor").lr == 3e-6
    actor, critic = (parse_megatron_role_args(plain, path, role) for role in ("actor", "critic"))
    assert (actor.lr, actor.kl_coef, critic.lr, critic.kl_coef, plain.lr) == (1e-6, 0.1, 1e-5, 0, 3e-6)
    assert critic.untie_embeddings_and_output_weights and not critic.disable_param_buffers_cpu_backup
    with pytest.raises(ConfigError, match="the role 'judge' is asked for; it must be actor or critic"):
        parse_megatron_role_args(args, path, "judge")


def test_what_a_critic_is_whatever_the_flags_say(ppo, model_folder):
    args = ppo("--kl-coef", "0.1", "--custom-advantage-function-path", "math.fsum", critic="kl_coef: 0.3")
    assert args.kl_coef == 0.1
    assert (args.critic_args.kl_coef, args.critic_args.custom_advantage_function_path) == (0, None)
    assert args.disable_param_buffers_cpu_backup and not args.critic_args.disable_param_buffers_cpu_backup
    kept = ppo(critic="disable_param_buffers_cpu_backup: true").critic_args
    assert kept.disable_param_buffers_cpu_backup


def test_a_critic_saves_beside_the_actor_and_logs_where_the_actor_does(ppo, tmp_path):
    critic = ppo("--save", str(tmp_path / "run"), "--save-interval", "1", "--save-hf", "x").critic_args
    assert (critic.save, critic.run_folder, critic.save_hf) == (
        str(tmp_path / "run/critic"),
        str(tmp_path / "run"),
        None,
    )


def test_a_fresh_critic_starts_from_the_actors_weights_or_from_its_own(ppo, model_folder, tmp_path):
    critic = ppo("--load", str(tmp_path / "empty")).critic_args
    assert (critic.load, critic.finetune, critic.start_rollout_id) == (str(model_folder), True, 0)
    trained = save(tmp_path / "values", 7)
    for key in ("load", "ref_load"):
        critic = ppo(critic=f"{key}: {trained}").critic_args
        assert (critic.load, critic.finetune, critic.start_rollout_id) == (trained, True, 0)


def test_a_critic_resumes_from_the_iteration_of_the_actors_checkpoint(ppo, tmp_path):
    run = save(tmp_path / "run", 4)
    save(tmp_path / "run/critic", 4)
    save(tmp_path / "run/critic", 6)  # killed between the critic's save and the actor's
    critic = ppo("--load", run).critic_args
    assert (critic.load, critic.ckpt_step, critic.finetune) == (str(tmp_path / "run/critic"), 4, False)
    assert critic.start_rollout_id is None


def test_a_resumed_run_without_a_checkpoint_of_the_critic_is_refused(ppo, tmp_path, model_folder):
    run = save(tmp_path / "run", 4)
    with pytest.raises(ConfigError, match="The actor resumes after rollout 4.*ref_load: FOLDER"):
        ppo("--load", run)
    save(tmp_path / "run/critic", 3)
    with pytest.raises(ConfigError, match="iter_0000004.*iter_0000003"):
        ppo("--load", run)


def test_a_new_critic_for_a_resumed_actor_is_asked_for_by_ref_load(ppo, tmp_path, model_folder):
    run = save(tmp_path / "run", 4)
    critic = ppo("--load", run, critic=f"ref_load: {model_folder}").critic_args
    assert (critic.load, critic.finetune, critic.start_rollout_id) == (str(model_folder), True, 5)
    save(tmp_path / "run/critic", 4)  # after its first save, the same command resumes it
    critic = ppo("--load", run, critic=f"ref_load: {model_folder}").critic_args
    assert (critic.load, critic.finetune) == (str(tmp_path / "run/critic"), False)


def test_a_critic_that_finds_no_save_names_the_folder_that_it_starts_from(ppo, tmp_path, model_folder, caplog):
    run, mine = save(tmp_path / "run", 4), tmp_path / "mine"
    ppo("--load", run, critic=f"load: {mine}, ref_load: {model_folder}")
    assert f"no checkpoint in {mine} and starts from the weights in {model_folder}." in caplog.text


def test_the_iteration_that_a_fresh_critic_starts_from_must_be_there(ppo, tmp_path):
    released = tmp_path / "converted"
    (released / "release").mkdir(parents=True)
    (released / "release" / "metadata.json").touch()
    (released / TRACKER).write_text("release")
    assert ppo("--load", str(released)).critic_args.load == str(released)
    with pytest.raises(ConfigError, match="load of the critic: .* has no checkpoint iter_0000003"):
        ppo("--load", str(released), critic="ckpt_step: 3")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("lrr: 1", "the critic's override lrr is no attribute of args. Did you mean lr?"),
        ("lr: fast", "lr of the critic is 'fast': 'fast' is not a number"),
        ("save: SAVE", "save of the critic is SAVE, the folder of the actor's checkpoints"),
        ("max_tokens_per_gpu: 7", "max_tokens_per_gpu of the critic is 7 and of the actor None"),
    ],
)
def test_overrides_that_cannot_work_are_refused(ppo, tmp_path, overrides, says):
    run = str(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        ppo("--save", run, critic=overrides.replace("SAVE", run))
    assert says.replace("SAVE", run) in str(caught.value)


def test_critic_only_rollouts_need_a_critic(make_args):
    with pytest.raises(
        ConfigError, match="--num-critic-only-steps is 3, and --advantage-estimator grpo has no critic"
    ):
        slime_validate_args(make_args("--num-critic-only-steps", "3"))


def test_both_roles_must_share_the_samples_alike(ppo):
    args = ppo()
    for role in (args, args.critic_args):
        role.data_parallel_size, role.context_parallel_size, role.virtual_pipeline_model_parallel_size = 2, 1, None
        role.microbatch_group_size_per_vp_stage = 1
    check_critic_layout(args)
    args.critic_args.data_parallel_size = 4
    with pytest.raises(ConfigError, match="data_parallel_size of the critic is 4 and of the actor 2"):
        check_critic_layout(args)


def test_what_the_running_job_finds_out_reaches_both_roles(ppo):
    args = ppo()
    record_runtime(args, num_rollout=17)
    assert (args.num_rollout, args.critic_args.num_rollout) == (17, 17)
