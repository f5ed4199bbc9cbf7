"""Every edge of the rollout side on which somebody waits: its deadline, what is seen when it passes, what comes of it.

``reliability_page`` makes docs/reliability.md of it, ``test_reliability`` holds it against the code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One kind of wait."""

    area: str
    waits: str
    """Who waits for what."""
    code: tuple[str, ...]
    """Dotted names of the functions or classes that wait."""
    bounds: tuple[str, ...]
    """What sets the deadline: flags, or constants as ``module.NAME``."""
    deadline: str
    """How the bounds make the deadline, where that is more than their sum."""
    raises: str
    """The error's class; empty when none is raised."""
    log: str
    """Where it is seen."""
    outcome: str
    tests: tuple[str, ...]
    """What shows that the row is true, as ``file::test``."""


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What happens to a run when a part of it fails."""

    fails: str
    promise: str
    cost: str
    """As ``python -m tests.e2e.recovery_times`` measured it, with what else was said."""
    tests: tuple[str, ...]


PROMISES = (
    Promise(
        fails="a rank of the trainer dies",
        promise="with `--save` and `--save-interval` the trainer, and its critic, start again from their last "
        "checkpoint; engines stay up, no token is drawn again, and on a CPU the weights are the same bit for bit",
        cost="48 s; the optimizer steps since the save are taken again",
        tests=(
            "tests/e2e/test_trainer_faults.py::test_ppo_trains_its_critic_first_and_deaths_of_either_take_both_back_and_change_no_bit",
        ),
    ),
    Promise(
        fails="the same, with `--trainer-recovery memory`",
        promise="no checkpoint is read: at most `--memory-checkpoint-interval` rollouts are trained again, twice as "
        "many when the death comes while a copy is on its way; where copies are lost, or have another digest, as "
        "above, and the log says so",
        cost="32 s, all but 2 for the ranks' processes to start; a step waits for the copy to its own host, and the "
        "next copy until that one has reached the keepers; what a rank owns lies three times in the hosts' memory, "
        "over several nodes five times",
        tests=(
            "tests/dist/test_memory_copy.py::test_all_that_training_changes_comes_back_to_the_bit",
            "tests/ext/recovery/test_memory_checkpoints.py::test_a_death_in_the_middle_of_a_copy_leaves_every_rank_with_the_one_before",
            "tests/e2e/test_trainer_faults.py::test_ppo_trains_its_critic_first_and_deaths_of_either_take_both_back_and_change_no_bit",
        ),
    ),
    Promise(
        fails="a node with ranks of the trainer dies",
        promise="its ranks start again there when it is back within `--cluster-wait-timeout-s`, or, with "
        "`--spare-nodes`, after 10 s on GPUs in reserve; engines on other nodes stay up; then as for a rank that died",
        cost="83 s with the reserve (`node`), 10 of them the wait; 17 s for a node that is back at once; idle GPUs",
        tests=(
            "tests/ext/recovery/test_trainer_gpus.py::test_a_node_that_does_not_come_back_is_left_for_the_reserve_and_is_the_reserve_then",
            "tests/ext/recovery/test_trainer_gpus.py::test_a_node_that_comes_back_in_time_is_taken_in",
        ),
    ),
    Promise(
        fails="a rank of the trainer stops or hangs",
        promise="found `--trainer-hang-timeout-s` after it last answered, or beyond twice the longest micro-batch or "
        "step; named; then as above",
        cost="70 s, of which 30 s are the flag's; a question to each rank every two seconds while the driver waits",
        tests=("tests/dist/test_ray_waiting.py::test_a_rank_whose_process_is_stopped_ends_the_wait_for_both",),
    ),
    Promise(
        fails="a loss or a gradient is not finite, or a rank holds other weights than its replicas",
        promise="the rank is named before the step, or the next one, changes a weight; `--on-nan` ends the run, "
        "leaves the step out, or leaves the rollout out and goes back to a checkpoint",
        cost="29 s for `rollback 1`; every trained weight is read once a step for its checksum, and 16 bytes a rank "
        "travel with the gradients: no wait for the device is added",
        tests=(
            "tests/dist/test_train_step_layouts.py::test_a_rank_that_goes_astray_is_named",
            "tests/ext/recovery/test_trainer_recovery.py::test_a_rollback_leaves_the_rollout_out_and_what_came_after_the_checkpoint",
        ),
    ),
    Promise(
        fails="the rollout manager dies while it generates",
        promise="where the trainer may be restarted and there is a ledger: it starts again with its engines, what "
        "they had answered comes from the ledger, and the trainer keeps its weights",
        cost="82 s with the engines' start; no answer drawn again, every group trained once",
        tests=(
            "tests/ext/recovery/test_manager_recovery.py::test_the_rollout_is_begun_again_behind_those_that_the_ledger_gives_back",
        ),
    ),
    Promise(
        fails="SIGTERM to the driver or a rank of the trainer",
        promise="with `--preemption-grace-s` the trainer's step ends and is saved; a rank on another node than the "
        "driver's is then let go, where `--trainer-recovery` is on and engines have GPUs of their own: its trainer "
        "starts on the reserve at once, else on its node once that is back, or has stayed beyond the grace (a save of "
        "`--async-save` that is still being written is lost, and its steps are taken again); otherwise "
        "the job leaves, and the next start repeats no step. SIGTERM that reaches Ray's own process of a node "
        "(raylet) ends its ranks untold, as the node's death",
        cost="saved 0.1 s after the signal, gone after 12 to 17 s; no step repeated; letting a rank go was timed in "
        "the simulator alone",
        tests=(
            "tests/ext/recovery/test_preemption.py::test_a_step_of_the_trainer_ends_and_is_saved_before_the_job_leaves",
            "tests/ext/recovery/test_trainer_recovery.py::test_ranks_that_are_told_to_leave_save_first_and_start_elsewhere_without_a_step_repeated",
            "tests/ext/recovery/test_trainer_gpus.py::test_a_node_that_is_to_go_is_left_at_once_for_the_reserve_and_else_waited_for",
        ),
    ),
    Promise(
        fails="the driver dies, or anything else that ends a run",
        promise="with `--supervise` the same command starts again, from the last save and the ledger",
        cost="163 s for one that is killed: a start of the job; the optimizer steps since the save are taken again",
        tests=("tests/ext/recovery/test_supervisor.py::test_a_driver_that_fails_is_started_again_until_it_ends_well",),
    ),
)
"""In the order of the page."""

ENDS_A_RUN = (
    "more recoveries within an hour than `--max-recoveries`",
    "a death before the first rollout, of the manager outside of generation, or of a rank without checkpoints",
    "a node that dies and does not come back, where no GPUs are in reserve, or that takes manager or driver along; of "
    "several that died, all must come back: Ray hands their GPUs out together",
    "bad input, a full disk at a save, and what the rows below say",
)
"""What ends a run, or with --supervise the driver, all the same."""


DRIVER = "Driver and Ray"
ENGINES = "Engines and routers"
REQUESTS = "Requests"
REWARDS = "Rewards"
WEIGHTS = "Weights and memory"
DATA = "Data on disk"
OTHERS = "Agents and services"

AREAS = (DRIVER, ENGINES, REQUESTS, REWARDS, WEIGHTS, DATA, OTHERS)

EDGES: tuple[Edge, ...] = (
    # Driver and Ray
    Edge(
        area=DRIVER,
        waits="Driver for a Ray cluster to let it in",
        code=("slime.ray.connect._join",),
        bounds=("slime.ray.connect.CONNECT_TIMEOUT_S",),
        deadline="",
        raises="ConfigError",
        log="driver's last lines",
        outcome="the run does not start; the line says how to set RAY_ADDRESS",
        tests=(
            "tests/unit/ray/test_deadlines.py::test_a_cluster_that_does_not_let_the_driver_in_is_an_error_that_names_the_variable",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="Driver for the placement group: nodes that join, then GPUs that are free",
        code=("slime.ray.gpus._wait_for_resources", "slime.ray.gpus._reserve"),
        bounds=("--cluster-wait-timeout-s",),
        deadline="once for the nodes, once for the GPUs",
        raises="ConfigError",
        log="driver; what is missing is a warning as soon as the wait begins",
        outcome="the run does not start; the error says what the cluster has and what the job needs",
        tests=("tests/dist/test_ray_waiting.py::test_too_few_gpus_is_an_error_that_says_what_to_change",),
    ),
    Edge(
        area=DRIVER,
        waits="Driver for the tasks that tell the place of each GPU",
        code=("slime.ray.gpus.bundle_identities",),
        bounds=(),
        deadline="300 s",
        raises="DeadlineError",
        log="driver",
        outcome="ends the run",
        tests=("tests/unit/ray/test_deadlines.py::test_the_tasks_that_tell_the_place_of_each_gpu_have_five_minutes",),
    ),
    Edge(
        area=DRIVER,
        waits="Any wait of the driver, when Ray's raylet of its node or the GCS ends or does not answer",
        code=("slime.ray.ray_servers.RayServers", "slime.ray.waiting.wait_for"),
        bounds=("slime.ray.ray_servers.CHECK_EVERY_S", "slime.ray.ray_servers.SILENT_S"),
        deadline="at once where the driver started them; else, and for one that hangs, the second for the GCS, and "
        "Ray's own health check (15 s for a raylet that has ended, about a minute for one that is stopped)",
        raises="ProcessError",
        log="driver, with the end of its log",
        outcome="ends the run, trainer recovery or not",
        tests=(
            "tests/dist/test_ray_servers.py::test_a_dead_raylet_ends_the_wait_for_an_actor_that_starts",
            "tests/unit/ray/test_ray_servers.py::test_a_gcs_may_be_silent_for_some_time_and_not_longer",
            "tests/unit/ray/test_ray_servers.py::test_a_node_that_the_gcs_counts_as_dead_is_named",
            "tests/e2e/test_start_faults.py::test_a_process_that_dies_while_a_start_waits_for_it_ends_the_start",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="Driver for Ray to take leave of it, at the end",
        code=("slime.ray.ray_servers.leave_ray",),
        bounds=("slime.ray.ray_servers.LEAVE_TIMEOUT_S",),
        deadline="twice: once more when a private cluster's processes are killed",
        raises="",
        log="driver",
        outcome="the process ends with its own exit code",
        tests=("tests/unit/ray/test_ray_servers.py::test_processes_that_hang_are_killed_when_the_driver_leaves",),
    ),
    Edge(
        area=DRIVER,
        waits="Any wait of a start, while engines start beside it (the trainer's set-up, the position in the data)",
        code=("slime.ray.waiting.watch_start", "slime.ray.startup.create_rollout_manager"),
        bounds=("--engine-start-timeout-s",),
        deadline="at once when an engine does not start",
        raises="ProcessError",
        log="driver, with the end of the engine's log",
        outcome="ends the run, whatever was waited for",
        tests=(
            "tests/dist/test_ray_waiting.py::test_what_fails_to_start_beside_a_wait_ends_the_wait_and_what_starts_does_not",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="Any wait for a remote call, when a watched actor of the job dies (a worker node that is gone, too)",
        code=("slime.ray.waiting.wait_for", "slime.ray.waiting.watch"),
        bounds=(),
        deadline="at once: Ray reports the death; a node that vanished without a word, after Ray's own health check",
        raises="EngineDiedError",
        log="driver, with the actor's name",
        outcome="ends the run with that actor as first cause, whatever was waited for",
        tests=(
            "tests/dist/test_ray_waiting.py::test_the_death_of_a_watched_actor_ends_a_wait_for_another_one",
            "tests/dist/test_logical_nodes.py::test_a_node_that_leaves_ends_every_wait_with_an_error_that_names_it",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="The same, when the actor is a rank of the trainer (--trainer-recovery checkpoint, memory)",
        code=("slime.ext.recovery.trainer_recovery.TrainerRecovery",),
        bounds=("slime.ext.recovery.trainer_recovery.NOTICE_S", "--max-recoveries"),
        deadline="for an error of another rank: until Ray has noticed the death behind it",
        raises="EngineDiedError",
        log="driver, with the rank and its trainer's way back",
        outcome="the trainer starts again from its copies in memory or its last checkpoint; after too many deaths "
        "within an hour the run ends",
        tests=(
            "tests/ext/recovery/test_trainer_recovery.py::test_a_step_is_taken_again_after_a_death_and_what_came_before_it",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="Driver for the trainer's GPUs on a node that died: for the node to come back, or for those in reserve",
        code=("slime.ext.recovery.trainer_gpus.TrainerGpus",),
        bounds=(
            "--cluster-wait-timeout-s",
            "slime.ext.recovery.trainer_gpus.NODE_RETURN_S",
            "slime.ext.recovery.trainer_gpus.CONNECT_TIMEOUT_S",
        ),
        deadline="the second where GPUs are in reserve (--spare-nodes); the third for a node to take a connection",
        raises="ProcessError",
        log="driver, every ten seconds; how many GPUs are gone",
        outcome="the trainer starts on what is there; without enough the run ends",
        tests=("tests/ext/recovery/test_trainer_gpus.py::test_without_a_node_the_run_ends_with_what_is_missing",),
    ),
    Edge(
        area=DRIVER,
        waits="Driver for copies of the trainer's state, before the next ones and after a death; ranks for keepers",
        code=(
            "slime.ext.recovery.memory_checkpoints.MemoryCheckpoints",
            "slime.ext.recovery.memory_checkpoints.CopyingRank",
        ),
        bounds=("--train-timeout-s",),
        deadline="for each chunk of a copy",
        raises="DataError",
        log="driver: that a keeper is lost, or that the trainer goes on from its last checkpoint",
        outcome="another keeper is started for the next copy; copies that are lost are made up for by the checkpoint",
        tests=(
            "tests/ext/recovery/test_memory_checkpoints.py::test_a_dead_keeper_means_the_checkpoint",
            "tests/ext/recovery/test_memory_checkpoints.py::test_the_place_of_a_dead_keeper_is_taken_at_the_next_copy",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="Driver for a trainer rank that neither dies nor goes on (SIGSTOP, a frozen node, a GPU that hangs)",
        code=("slime.ray.heartbeats.Heartbeats", "slime.ray.actor_group.RayTrainGroup"),
        bounds=("--trainer-hang-timeout-s", "slime.ray.actor_group.HEARTBEAT_EVERY_S"),
        deadline="without an answer, or beyond twice the longest micro-batch or optimizer step before",
        raises="HangError",
        log="driver, with the rank and where the slowest ones stand",
        outcome="as for a rank that died",
        tests=(
            "tests/dist/test_ray_waiting.py::test_a_rank_whose_process_is_stopped_ends_the_wait_for_both",
            "tests/dist/test_ray_waiting.py::test_ranks_that_do_not_go_on_end_the_wait_and_the_one_behind_is_named",
            "tests/ext/recovery/test_trainer_recovery.py::test_a_rank_that_hangs_is_treated_like_one_that_died",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="Whoever sent SIGTERM to the driver or a trainer rank, for the job to save and leave",
        code=(
            "slime.ext.recovery.job.RecoveringJob",
            "slime.ext.recovery.preemption.Preemption",
            "slime.ray.sigterm.Sigterm",
            "slime.ray.waiting.Watched",
        ),
        bounds=("--preemption-grace-s", "slime.ray.waiting.SIGTERM_POLL_S"),
        deadline="of the driver; a rank's signal reaches it within the constant",
        raises="",
        log="driver: 'Saved ... s after SIGTERM', or that the grace was too short",
        outcome="the job leaves with code 130, and the next start goes on from that save, or from the one before it; "
        "or the trainer starts without the node",
        tests=(
            "tests/ext/recovery/test_preemption.py::test_a_step_of_the_trainer_ends_and_is_saved_before_the_job_leaves",
            "tests/ext/recovery/test_preemption.py::test_a_step_or_a_save_that_takes_longer_than_the_grace_is_left",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="Supervisor for its driver (--supervise)",
        code=("slime.ext.recovery.supervisor.supervise",),
        bounds=("--max-recoveries", "slime.ext.recovery.supervisor.PAUSE_S"),
        deadline="as long as the driver runs; the constant before it is started again",
        raises="",
        log="supervisor: the cause, and how often within the hour",
        outcome="the driver goes on from its last save; after too many failures the list of their causes",
        tests=(
            "tests/ext/recovery/test_supervisor.py::test_a_driver_that_fails_is_started_again_until_it_ends_well",
            "tests/ext/recovery/test_supervisor.py::test_too_many_failures_end_it_with_the_list_of_all_and_old_ones_do_not_count",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="Driver for a rollout or an evaluation of the manager",
        code=(
            "slime.ray.train_loop.TrainJob.finish_generate",
            "slime.ray.train_loop.TrainJob.evaluate",
            "slime.ext.eval_background.evaluation.BackgroundEvaluation.finish",
        ),
        bounds=("--rollout-timeout-s", "slime.ray.engines.fleet.DEADLINE_MARGIN_S"),
        deadline="the flag and twice the margin: the inner deadlines come first and say more",
        raises="DeadlineError",
        log="driver; a line every minute that it still waits",
        outcome="ends the run",
        tests=(
            "tests/unit/ray/test_deadlines.py::test_a_wait_has_the_deadline_of_its_row",
            "tests/dist/test_ray_waiting.py::test_a_passed_deadline_names_the_work",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="Driver for short calls of the manager (start, data position, ledger, pause of the monitors)",
        code=("slime.ray.train_loop.TrainJob._ask", "slime.ray.startup.create_rollout_manager"),
        bounds=("--train-timeout-s",),
        deadline="",
        raises="DeadlineError",
        log="driver",
        outcome="ends the run",
        tests=(
            "tests/unit/ray/test_deadlines.py::test_a_wait_has_the_deadline_of_its_row",
            "tests/dist/test_ray_waiting.py::test_a_passed_deadline_names_the_work",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="Driver for the trainers and for the first rank's address and layout",
        code=("slime.ray.actor_group.RayTrainGroup",),
        bounds=("--train-timeout-s", "--weight-update-timeout-s"),
        deadline="600 s for the first rank to start, 120 s for its layout; then the flags",
        raises="DeadlineError",
        log="driver",
        outcome="ends the run",
        tests=(
            "tests/unit/ray/test_deadlines.py::test_a_wait_has_the_deadline_of_its_row",
            "tests/dist/test_ray_waiting.py::test_a_passed_deadline_names_the_work",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="Trainer for its share of the rollout in Ray's object store",
        code=("slime.ray.train_actor.TrainRayActor.train_boxed",),
        bounds=("slime.ray.train_actor.FETCH_TIMEOUT_S",),
        deadline="",
        raises="DeadlineError",
        log="trainer, then driver",
        outcome="ends the run",
        tests=(
            "tests/unit/ray/test_deadlines.py::test_a_wait_has_the_deadline_of_its_row",
            "tests/dist/test_ray_waiting.py::test_a_passed_deadline_names_the_work",
        ),
    ),
    Edge(
        area=DRIVER,
        waits="Driver for engines and routers to stop at the end",
        code=("slime.ray.engines.fleet.EngineFleet.stop", "slime.ray.train_loop.TrainJob.finish"),
        bounds=("--shutdown-timeout-s",),
        deadline="twice that for the manager as a whole",
        raises="DeadlineError",
        log="driver",
        outcome="what is left is killed with its owner: servers and routers watch it and end themselves",
        tests=("tests/unit/ray/test_deadlines.py::test_the_end_waits_for_engines_no_longer_than_its_flag",),
    ),
    # Engines and routers
    Edge(
        area=ENGINES,
        waits="Engine actor for its SGLang server to generate a token",
        code=(
            "slime.backends.sglang_utils.sglang_engine.SGLangEngine.wait_ready",
            "slime.backends.sglang_utils.sglang_engine.wait_until_healthy",
        ),
        bounds=("--engine-start-timeout-s",),
        deadline="at once when the process ends, or one that it started: within two seconds its family ends with it",
        raises="ProcessError",
        log="driver, with the end of the server's log, its path, and its first error",
        outcome="first start: ends the run, but for a port of an engine on one node that another process took; that, "
        "and a restart: next attempt, 3 in all",
        tests=(
            "tests/dist/test_engine_replacement.py::test_an_engine_that_cannot_start_again_ends_the_run_with_the_first_cause",
            "tests/dist/test_engine_replacement.py::test_an_engine_whose_port_was_taken_starts_at_others",
            "tests/unit/backends/sglang_utils/test_child_process.py::test_a_family_ends_with_any_of_its_processes_whatever_its_parents_wait_for",
        ),
    ),
    Edge(
        area=ENGINES,
        waits="Manager for all engines to start; for their actors to name free ports (600 s at most)",
        code=("slime.ray.engines.models.wait_until_serving", "slime.ray.engines.actor._probe"),
        bounds=("--engine-start-timeout-s",),
        deadline="the flag and 120 s: the engine's own deadline comes first; at once when a router ends meanwhile, or "
        "an engine's server on a node that answers nobody",
        raises="ProcessError",
        log="driver",
        outcome="ends the run",
        tests=(
            "tests/unit/ray/engines/test_restarts.py::test_what_dies_of_a_start_beside_the_servers_that_are_waited_for_ends_it",
            "tests/unit/ray/test_deadlines.py::test_a_wait_has_the_deadline_of_its_row",
            "tests/dist/test_ray_waiting.py::test_a_passed_deadline_names_the_work",
        ),
    ),
    Edge(
        area=ENGINES,
        waits="Manager for a router to answer, and to list an engine",
        code=(
            "slime.backends.sglang_utils.router_process.start_router",
            "slime.backends.sglang_utils.router_process.register_worker",
        ),
        bounds=(
            "slime.backends.sglang_utils.router_process.START_TIMEOUT_S",
            "slime.backends.sglang_utils.router_process.REGISTER_TIMEOUT_S",
        ),
        deadline="at once when the process ends",
        raises="ProcessError",
        log="driver, with the end of the router's log",
        outcome="ends the run; for a restarted engine: next attempt",
        tests=(
            "tests/unit/backends/sglang_utils/test_router_process.py::test_no_router_at_the_given_address_is_an_error",
            "tests/unit/backends/sglang_utils/test_router_process.py::test_an_engine_that_answers_nothing_is_never_listed",
            "tests/unit/backends/sglang_utils/test_router_process.py::test_a_taken_port_ends_the_start_with_the_routers_log",
        ),
    ),
    Edge(
        area=ENGINES,
        waits="Anybody for a control request to an engine or router (synchronous client)",
        code=("slime.backends.sglang_utils.server_control.ServerControl.request",),
        bounds=("slime.backends.sglang_utils.server_control.CONTROL_TIMEOUT_S",),
        deadline="or the caller's own (--weight-update-timeout-s for weights); counted from the last byte that came",
        raises="EngineError",
        log="whoever asked",
        outcome="as the caller says; sent once, never repeated",
        tests=(
            "tests/unit/backends/sglang_utils/test_server_control.py::test_a_refused_probe_is_a_fault_and_a_late_answer_is_not",
            "tests/unit/backends/sglang_utils/test_server_control.py::test_a_request_is_sent_once_whatever_comes_of_it_and_left_at_its_deadline",
        ),
    ),
    Edge(
        area=ENGINES,
        waits="Job for the description of external engines",
        code=("slime.backends.sglang_utils.external_engines.fetch_info",),
        bounds=("slime.backends.sglang_utils.external_engines.INFO_TIMEOUT_S",),
        deadline="",
        raises="ConfigError",
        log="driver",
        outcome="the run does not start",
        tests=(
            "tests/unit/backends/sglang_utils/test_external_engines.py::test_an_engine_that_does_not_answer_is_named",
        ),
    ),
    Edge(
        area=ENGINES,
        waits="Manager for the rollout function, looking after router and engines every 3 s",
        code=("slime.ray.engines.fleet.EngineFleet.run_watched",),
        bounds=("--rollout-timeout-s", "slime.ray.engines.fleet.DEADLINE_MARGIN_S"),
        deadline="a dead engine or router: within 3 s",
        raises="ProcessError",
        log="manager and driver, with the engine's name, how it ended and the end of its log",
        outcome="ends the run; with --use-fault-tolerance the engine and the router are restarted",
        tests=(
            "tests/unit/ray/test_deadlines.py::test_a_rollout_function_that_does_not_return_ends_the_run_at_its_deadline",
        ),
    ),
    Edge(
        area=ENGINES,
        waits="Manager for a router's sign of life (a router that hangs)",
        code=("slime.ray.engines.fleet.EngineFleet.check",),
        bounds=("--rollout-health-check-interval", "--rollout-health-check-timeout"),
        deadline="the sum, during rollouts",
        raises="EngineDiedError",
        log="manager",
        outcome="ends the run; with --use-fault-tolerance restarted at its address, engines registered anew",
        tests=(
            "tests/unit/ray/test_deadlines.py::test_a_router_that_gives_no_sign_of_life_ends_the_run_or_is_started_again",
        ),
    ),
    Edge(
        area=ENGINES,
        waits="Stall monitor for a token of an engine, during rollouts without --use-fault-tolerance",
        code=("slime.ray.engines.monitor.StallMonitor",),
        bounds=("--rollout-stall-timeout-s", "--rollout-health-check-interval", "--rollout-health-check-timeout"),
        deadline="the first; looked at every interval, each look with its timeout",
        raises="EngineDiedError",
        log="manager: a warning for each look without an answer; then the driver, with the engine's name",
        outcome="ends the run",
        tests=(
            "tests/unit/ray/engines/test_monitor.py::test_an_engine_that_says_nothing_for_the_whole_time_is_named",
        ),
    ),
    Edge(
        area=ENGINES,
        waits="Health monitor for an engine: it hangs, or answers a probe with garbage",
        code=("slime.ray.engines.monitor.HealthMonitor", "slime.ray.engines.group.EngineGroup.find_exited"),
        bounds=(
            "--rollout-health-check-interval",
            "--rollout-health-check-timeout",
            "slime.ray.engines.monitor.EXIT_POLL_S",
        ),
        deadline="the two flags' sum for a hang, 2 s for a process that ended; only with --use-fault-tolerance",
        raises="",
        log="manager: '... is evicted now: why'",
        outcome="evicted (removed from the router, killed), restarted, given the weights, registered",
        tests=(
            "tests/dist/test_engine_replacement.py::test_a_faulty_engine_is_evicted_and_restarted_on_the_same_gpu_without_touching_the_other",
        ),
    ),
    Edge(
        area=ENGINES,
        waits="Group for an engine's restart, and for the dead one to be killed (15 s)",
        code=("slime.ray.engines.group.EngineGroup._restart", "slime.ray.engines.group.EngineGroup.wait_settled"),
        bounds=("--engine-start-timeout-s", "slime.ray.engines.actor.KILL_TIMEOUT_S"),
        deadline="the first and 120 s for each of 3 attempts; 5 restarts of one engine in a rollout",
        raises="ProcessError",
        log="manager, with the reason of the first death",
        outcome="ends the run with that reason",
        tests=(
            "tests/unit/ray/engines/test_restarts.py::test_three_starts_have_the_flag_and_two_minutes_each_and_the_run_ends_with_the_first_death",
            "tests/unit/ray/engines/test_restarts.py::test_an_engine_is_started_again_five_times_in_a_rollout",
            "tests/dist/test_engine_replacement.py::test_an_engine_that_cannot_start_again_ends_the_run_with_the_first_cause",
        ),
    ),
    Edge(
        area=ENGINES,
        waits="Anybody for a child process to be gone after SIGKILL",
        code=("slime.backends.sglang_utils.child_process.ChildProcess.stop",),
        bounds=(),
        deadline="10 s",
        raises="DeadlineError",
        log="whoever stopped it",
        outcome="the error names the processes that are left",
        tests=(
            "tests/unit/backends/sglang_utils/test_child_process.py::test_killing_a_tree_leaves_none_of_it",
            "tests/unit/backends/sglang_utils/test_child_process.py::test_what_outlives_its_sigkill_is_named_at_the_deadline",
        ),
    ),
    # Requests
    Edge(
        area=REQUESTS,
        waits="Rollout function for its groups",
        code=(
            "slime.rollout.sglang_rollout.generate_rollout_async",
            "slime.rollout.waiting.LongWait",
            "slime.rollout.pool.GroupPool",
            "slime.rollout.sglang_rollout.eval_rollout",
        ),
        bounds=("--rollout-timeout-s",),
        deadline="",
        raises="DeadlineError",
        log="manager: groups done and wanted, and which engines and plug-ins still work",
        outcome="ends the run; every task is cancelled",
        tests=(
            "tests/unit/rollout/test_sglang_rollout.py::test_the_deadline_names_what_is_done_and_which_engine_is_busy",
            "tests/unit/rollout/test_eval_rollout.py::test_the_deadline_ends_an_evaluation",
        ),
    ),
    Edge(
        area=REQUESTS,
        waits="Synchronous code for a coroutine on the background loop",
        code=("slime.utils.async_utils.AsyncLoopThread.run", "slime.rollout.sglang_rollout.generate_rollout"),
        bounds=("--rollout-timeout-s", "slime.rollout.sglang_rollout.IDLE_WAIT_S"),
        deadline="the flag and twice the constant: the coroutine keeps the flag itself",
        raises="DeadlineError",
        log="manager",
        outcome="ends the run",
        tests=("tests/unit/utils/test_async_utils.py::test_a_coroutine_past_its_deadline_is_cancelled",),
    ),
    Edge(
        area=REQUESTS,
        waits="Anybody on the background loop for code of a plug-in that blocks it",
        code=("slime.utils.async_utils.LoopWatch.look", "slime.ray.rollout.RolloutManager"),
        bounds=(
            "--loop-stall-timeout-s",
            "slime.utils.async_utils.STALL_WARNING_S",
            "slime.utils.async_utils.INTERPRETER_MARGIN_S",
        ),
        deadline="the flag ends the run; the warning comes first, then after twice its time and so on; code that "
        "holds the interpreter's lock ends the process the margin later",
        raises="DeadlineError",
        log="manager: flag, path and sample of the plug-in, and the frames at which it is",
        outcome="ends the run: the deadlines of requests and rewards do not pass while the loop is blocked",
        tests=(
            "tests/unit/utils/test_plugins.py::test_what_blocks_the_loop_is_named_and_ends_the_wait",
            "tests/unit/utils/test_plugins.py::test_code_that_holds_the_interpreters_lock_ends_the_process_with_its_frames",
        ),
    ),
    Edge(
        area=REQUESTS,
        waits="Anybody for the module of a plug-in to import",
        code=("slime.utils.plugins.import_plugin", "slime.flags.hook_checks.check_hooks_on_driver"),
        bounds=("--plugin-import-timeout-s", "slime.utils.plugins.IMPORT_WARNING_S"),
        deadline="the flag; a warning after the constant",
        raises="HookError",
        log="driver, before anything starts: flag, path and the frames at which the import is",
        outcome="the run does not start",
        tests=("tests/unit/utils/test_plugins.py::test_a_module_that_blocks_has_a_deadline_and_names_where_it_is",),
    ),
    Edge(
        area=REQUESTS,
        waits="Anybody for cancelled tasks to end",
        code=("slime.rollout.waiting.cancel_all",),
        bounds=("slime.rollout.waiting.CANCEL_WAIT_S",),
        deadline="",
        raises="",
        log="manager: how many are left, and the first of them",
        outcome="they are left behind; the first cause goes on its way",
        tests=("tests/unit/rollout/test_waiting.py::test_a_task_that_swallows_its_cancellation_is_named_and_left",),
    ),
    Edge(
        area=REQUESTS,
        waits="Sample for the answer to /generate: connection refused, cut (half an answer), or status 408, 429, 5xx",
        code=("slime.utils.http_utils.post", "slime.rollout.sglang_rollout.generate"),
        bounds=(
            "slime.utils.http_utils.POST_TIMEOUT_S",
            "slime.utils.http_utils.CONNECT_TIMEOUT_S",
            "slime.rollout.config.DEFAULT_RETRIES",
        ),
        deadline="60 repetitions, a second apart; with --use-fault-tolerance a further one for each second that an "
        "engine may take to start, and none is counted while the router has no engine",
        raises="EngineError",
        log="manager: a warning at tries 1, 10, 60, 120 ...",
        outcome="repeated, through the router, from the tokens that the sample holds; then ends the run",
        tests=(
            "tests/unit/rollout/test_rollout_faults.py::test_the_samples_are_those_of_a_rollout_without_the_fault",
            "tests/unit/utils/test_http_utils.py::test_retries_end_with_one_error_that_names_url_attempts_and_cause",
        ),
    ),
    Edge(
        area=REQUESTS,
        waits="Sample for the answer of an engine that hangs",
        code=("slime.utils.http_utils.post", "slime.rollout.sglang_rollout.generate_rollout"),
        bounds=("slime.utils.http_utils.POST_TIMEOUT_S", "--rollout-timeout-s"),
        deadline="with --use-fault-tolerance the monitor kills the engine after interval and timeout, which cuts it",
        raises="EngineError",
        log="manager",
        outcome="repeated elsewhere with fault tolerance; without, the stall monitor ends the run",
        tests=(
            "tests/unit/rollout/test_rollout_faults.py::test_an_engine_that_hangs_ends_the_rollout_at_its_deadline",
        ),
    ),
    Edge(
        area=REQUESTS,
        waits="Sample for a usable answer (garbage, parts missing, impossible tokens or log-probs, wrong counts)",
        code=(
            "slime.rollout.engine_request.ask",
            "slime.utils.sglang_meta.problem_with_answer",
            "slime.rollout.config.RolloutConfig",
        ),
        bounds=("--rollout-health-check-interval", "--rollout-health-check-timeout"),
        deadline="the sum and 30 s with --use-fault-tolerance; none without",
        raises="EngineError",
        log="manager, with sample, request and the field that is wrong",
        outcome="asked again until the monitor has found the engine; then, or without fault tolerance, ends the run",
        tests=(
            "tests/unit/rollout/test_engine_faults.py::test_nonsense_without_an_end_is_an_error_when_the_monitor_has_had_its_time",
            "tests/unit/rollout/test_engine_faults.py::test_an_answer_with_impossible_numbers_is_asked_for_again_or_ends_the_run",
        ),
    ),
    Edge(
        area=REQUESTS,
        waits="Sample for a worker that is asked directly, because the router would drop a field",
        code=("slime.rollout.direct_workers.post_to_worker",),
        bounds=("slime.rollout.direct_workers._ATTEMPTS", "slime.utils.http_utils.POST_TIMEOUT_S"),
        deadline="so many attempts, a second apart; more with --use-fault-tolerance",
        raises="EngineError",
        log="manager: 'Worker ... failed; trying another'",
        outcome="sent to another worker; then ends the run",
        tests=(
            "tests/unit/rollout/test_direct_workers.py::test_a_worker_that_has_died_is_left_out_and_its_requests_go_elsewhere",
            "tests/unit/rollout/test_direct_workers.py::test_workers_that_all_fail_are_an_error_after_so_many_attempts",
        ),
    ),
    Edge(
        area=REQUESTS,
        waits="Sample for a stream that breaks or stops",
        code=(
            "slime.utils.http_utils.post_for_events",
            "slime.rollout.sglang_streaming_rollout.generate_streaming",
        ),
        bounds=(
            "slime.utils.http_utils.POST_TIMEOUT_S",
            "slime.rollout.sglang_streaming_rollout.ABORT_GRACE_S",
        ),
        deadline="the second once the rollout is over",
        raises="EngineError",
        log="manager: 'The stream of sample ... broke; it goes on from N tokens'",
        outcome="what had arrived is kept, and the sample goes on from there; as many tries as a plain request",
        tests=(
            "tests/unit/rollout/test_sglang_streaming_rollout.py::test_a_stream_that_breaks_goes_on_where_it_broke",
            "tests/unit/rollout/test_sglang_streaming_rollout.py::test_a_stream_that_stops_is_left_at_its_deadline_and_goes_on_where_it_stopped",
            "tests/unit/rollout/test_sglang_streaming_rollout.py::test_streams_that_break_without_an_end_are_an_error_after_as_many_tries_as_of_a_plain_request",
            "tests/unit/rollout/test_sglang_streaming_rollout.py::test_an_engine_that_does_not_end_the_stream_when_the_rollout_is_over_is_left",
        ),
    ),
    Edge(
        area=REQUESTS,
        waits="Rollout for the abort: engines to take it, groups to come back",
        code=(
            "slime.rollout.sglang_rollout.abort",
            "slime.rollout.control_client.abort_engines",
            "slime.rollout.control_client.control_post",
        ),
        bounds=(
            "--rollout-timeout-s",
            "slime.rollout.sglang_rollout.IDLE_WAIT_S",
            "slime.rollout.control_client.CONTROL_TIMEOUT_S",
        ),
        deadline="what is left of the flag, at least the first constant; the second for each request, repeated until "
        "nothing is pending",
        raises="DeadlineError",
        log="manager: 'Engine ... did not take the abort'",
        outcome="an engine that does not answer is left to its monitor; groups that do not come back end the run",
        tests=(
            "tests/unit/rollout/test_sglang_rollout.py::test_a_request_that_reaches_the_engine_after_the_first_abort_is_aborted_too",
            "tests/unit/rollout/test_sglang_rollout.py::test_groups_that_do_not_come_back_from_an_abort_end_the_run_and_a_deaf_engine_is_named",
        ),
    ),
    Edge(
        area=REQUESTS,
        waits="Rollout for engines to be idle after the abort",
        code=("slime.rollout.sglang_rollout._wait_until_idle",),
        bounds=("slime.rollout.sglang_rollout.IDLE_WAIT_S",),
        deadline="",
        raises="",
        log="manager: engines and their requests",
        outcome="goes on without them",
        tests=(
            "tests/unit/rollout/test_sglang_rollout.py::test_engines_that_stay_busy_after_the_abort_hold_the_rollout_up_no_longer_than_a_minute",
        ),
    ),
    Edge(
        area=REQUESTS,
        waits="Fully asynchronous rollout for finished groups",
        code=("slime.rollout.fully_async_rollout.AsyncRolloutWorker", "slime.rollout.pool.GroupPool"),
        bounds=("--rollout-timeout-s",),
        deadline="a failure in the producer or in a group: at once",
        raises="DeadlineError",
        log="manager, with the engines that hold requests",
        outcome="ends the run",
        tests=(
            "tests/unit/rollout/test_fully_async_rollout.py::test_a_rollout_that_takes_too_long_says_which_engine_holds_requests",
            "tests/unit/rollout/test_fully_async_rollout.py::test_an_error_in_a_reward_ends_the_rollout_that_waits",
        ),
    ),
    Edge(
        area=REQUESTS,
        waits="Driver for the trial of tokenizer and chat template",
        code=("slime.rollout.tokenizer_trial.TokenizerTrial",),
        bounds=("slime.rollout.tokenizer_trial.TRIAL_TIMEOUT_S", "slime.rollout.prompt_dataset.RENDER_TIMEOUT_S"),
        deadline="for the whole; the second for the tokenizer, and for each row, whose process an alarm ends",
        raises="ConfigError",
        log="driver, with the file or the row",
        outcome="ends the run before it begins",
        tests=(
            "tests/unit/rollout/test_tokenizer_trial.py::test_a_template_without_an_end_is_killed_and_named_by_its_file_and_row",
        ),
    ),
    Edge(
        area=REQUESTS,
        waits="Rollout for the engines' weight version",
        code=("slime.rollout.staleness.VersionClock.refresh",),
        bounds=("slime.rollout.control_client.CONTROL_TIMEOUT_S",),
        deadline="",
        raises="",
        log="manager (debug)",
        outcome="the version counts as unknown; the next rollout asks again",
        tests=(
            "tests/unit/rollout/test_staleness.py::test_an_engine_that_does_not_tell_its_version_has_none_until_it_is_asked_again",
        ),
    ),
    Edge(
        area=REQUESTS,
        waits="Manager for posting actors (--use-distributed-post)",
        code=("slime.ray.distributed_post.start_distributed_post", "slime.ray.distributed_post.DistributedPost"),
        bounds=("slime.ray.distributed_post.START_TIMEOUT_S", "slime.utils.http_utils.POST_TIMEOUT_S"),
        deadline="to start; then as any post",
        raises="EngineError",
        log="manager",
        outcome="an actor that dies is asked no more; without any, requests are posted from the manager",
        tests=(
            "tests/dist/test_engine_replacement.py::test_posts_go_through_actors_and_through_this_process_when_they_are_gone",
        ),
    ),
    # Rewards
    Edge(
        area=REWARDS,
        waits="Sample for its reward, whoever gives it (built-in, --custom-rm-path, a server, a group's)",
        code=("slime.rollout.rm_hub.policy.within", "slime.rollout.rm_hub.policy.GraderThreads.run"),
        bounds=("--rm-timeout-s",),
        deadline="for a built-in grader from when its thread begins; for a custom one that awaits (one that blocks "
        "the event loop meets --loop-stall-timeout-s)",
        raises="TimeoutError",
        log="manager: a warning with the sample's index; the sample's metadata['reward_error']",
        outcome="--rm-failure-policy: FAILED and not counted, or reward 0, or the run ends; "
        "--rm-max-failures in a row end it with the first cause",
        tests=(
            "tests/unit/rollout/rm_hub/test_grading_policy.py::test_with_the_policy_zero_a_failed_grading_is_a_logged_zero",
            "tests/unit/rollout/rm_hub/test_grading_policy.py::test_a_built_in_grader_that_blocks_costs_its_response_and_not_the_loop",
            "tests/unit/rollout/rm_hub/test_grading_policy.py::test_by_default_a_response_that_is_not_graded_does_not_train",
            "tests/unit/rollout/rm_hub/test_grading_policy.py::test_with_the_policy_raise_the_run_ends",
            "tests/unit/rollout/rm_hub/test_grading_policy.py::test_failures_in_a_row_end_the_run_with_the_first_cause",
            "tests/unit/rollout/rm_hub/test_grading_policy.py::test_waiting_for_a_thread_does_not_count_against_the_deadline",
        ),
    ),
    Edge(
        area=REWARDS,
        waits="Sample for a reward server that is down, slow, or answers garbage",
        code=("slime.rollout.rm_hub.remote_rm", "slime.rollout.rm_hub.policy.within"),
        bounds=("slime.rollout.rm_hub.TIMEOUT_S", "--rm-timeout-s"),
        deadline="10 tries, 1, 2, 4 ... 30 s apart, within the flag",
        raises="GraderError",
        log="manager: a warning for every try",
        outcome="repeated; then the policy above",
        tests=(
            "tests/unit/rollout/rm_hub/test_grading_policy.py::test_a_reward_server_that_hangs_costs_one_deadline",
            "tests/unit/rollout/rm_hub/test_grading_policy.py::test_garbage_from_a_reward_server_is_asked_for_again_and_then_zero",
            "tests/unit/rollout/rm_hub/test_grading_policy.py::test_a_reward_server_that_is_down_costs_the_response",
        ),
    ),
    Edge(
        area=REWARDS,
        waits="Sample for the teacher of on-policy distillation",
        code=("slime.rollout.on_policy_distillation.reward_func", "slime.rollout.rm_hub.policy.within"),
        bounds=("slime.rollout.on_policy_distillation.REQUEST_TIMEOUT_S", "--rm-timeout-s"),
        deadline="10 tries, within the flag",
        raises="GraderError",
        log="manager: a warning for every try",
        outcome="repeated; then the policy above, and the sample is not trained",
        tests=(
            "tests/unit/rollout/test_on_policy_distillation.py::test_a_teacher_that_fails_for_a_while_is_asked_again",
            "tests/unit/rollout/test_on_policy_distillation.py::test_a_teacher_that_goes_on_failing_is_named",
        ),
    ),
    Edge(
        area=REWARDS,
        waits="Math grader for the child process that runs sympy or math-verify",
        code=("slime.rollout.rm_hub.symbolic.SymbolicWorker",),
        bounds=(
            "slime.rollout.rm_hub.symbolic.TIME_LIMIT_S",
            "slime.rollout.rm_hub.symbolic.START_LIMIT_S",
            "slime.rollout.rm_hub.symbolic.KILL_WAIT_S",
        ),
        deadline="for an expression, for the start, for the end",
        raises="GraderError",
        log="manager (info)",
        outcome="the answer counts as wrong and the child is replaced; one that cannot start: the policy above",
        tests=(
            "tests/unit/rollout/rm_hub/test_math_graders.py::test_an_expression_that_never_ends_is_wrong_and_the_next_one_is_graded",
            "tests/unit/rollout/rm_hub/test_math_graders.py::test_a_process_of_the_graders_that_does_not_start_is_an_error_and_not_a_wrong_answer",
        ),
    ),
    Edge(
        area=REWARDS,
        waits="IFBench grader for the download of its checkers",
        code=("slime.rollout.rm_hub.ifbench._clone",),
        bounds=("slime.rollout.rm_hub.ifbench.CLONE_TIMEOUT_S",),
        deadline="",
        raises="ConfigError",
        log="manager",
        outcome="ends the run",
        tests=(
            "tests/unit/rollout/rm_hub/test_other_graders.py::test_a_download_of_ifbench_that_does_not_end_is_an_error_with_the_command",
        ),
    ),
    # Weights and memory
    Edge(
        area=WEIGHTS,
        waits="Trainers for an engine's answer at each step of a weight push",
        code=(
            "slime.weights.push.participants.PushClock",
            "slime.weights.push.steps.require_repacking",
            "slime.ext.fast_push.push.run_check",
            "slime.ext.fast_push.shared_memory.SharedMemoryCarrier",
            "slime.backends.megatron_utils.update_weight.updater.WeightUpdater",
            "slime.ray.engine_handles.RayPending.wait",
        ),
        bounds=("--weight-update-timeout-s",),
        deadline="half of what is left of it",
        raises="ProcessError",
        log="trainer: 'engine ... is excluded from the push', with the reason",
        outcome="it stays paused, the others go on; --weight-push-failure refills it, drops it or ends the run",
        tests=(
            "tests/unit/weights/push/test_participants.py::test_an_engine_gets_half_of_the_time_that_is_left",
            "tests/ext/fast_push/dist/test_push_faults.py::test_each_engine_serves_a_whole_version_or_is_fenced_and_named",
        ),
    ),
    Edge(
        area=WEIGHTS,
        waits="Trainer and engines for each other in a broadcast of weights",
        code=(
            "slime.ext.fast_push.channel.WeightChannel",
            "slime.ext.fast_push.distributed.WeightGroup",
            "slime.backends.megatron_utils.update_weight.engine_group.EngineGroup",
            "slime.backends.megatron_utils.update_weight.updater.WeightUpdater",
        ),
        bounds=("--weight-update-timeout-s", "slime.ext.fast_push.channel.STORE_TIMEOUT_S"),
        deadline="the second for a trainer that does not answer; at once when a member dies: the group is abandoned",
        raises="WeightSyncError",
        log="trainer: 'engine ... is excluded from the push', with the reason",
        outcome="the push is repeated over a group without the engine that broke it",
        tests=(
            "tests/ext/fast_push/test_channel.py::test_a_member_that_does_not_come_ends_the_joining_of_the_others_at_the_deadline",
            "tests/ext/fast_push/test_channel.py::test_a_member_does_not_wait_for_the_store_of_a_trainer_that_is_gone",
            "tests/ext/fast_push/dist/test_push_faults.py::test_the_push_is_repeated_only_where_a_broadcast_broke",
        ),
    ),
    Edge(
        area=WEIGHTS,
        waits="Engine actor for another that changes the same host's copy of the weights",
        code=(
            "slime.ext.disk_push.local_copy.LocalCopy",
            "slime.ext.disk_push.local_copy.pull_weights",
        ),
        bounds=("--weight-update-timeout-s",),
        deadline="",
        raises="WeightSyncError",
        log="trainer: 'engine ... is excluded from the push', with the reason",
        outcome="as for every engine that does not take a push",
        tests=(
            "tests/ext/disk_push/test_local_copy.py::test_another_process_at_work_is_waited_for_until_the_deadline",
        ),
    ),
    Edge(
        area=WEIGHTS,
        waits="Engine for the requests of the adapter before the last, when the next one comes",
        code=(
            "slime.backends.sglang_utils.sglang_plugin._wait_for_unload",
            "slime.backends.sglang_utils.weight_verbs.WeightVerbs.load_adapter",
        ),
        bounds=("--weight-update-timeout-s", "slime.backends.sglang_utils.sglang_plugin.LOST_COUNT_S"),
        deadline="the first; the second for requests that SGLang lost count of",
        raises="ProcessError",
        log="trainer: 'engine ... is excluded from the push', with the reason",
        outcome="as for every engine that does not take a push",
        tests=(
            "tests/unit/backends/sglang_utils/test_sglang_engine.py::"
            "test_an_adapter_is_unloaded_though_a_request_was_never_counted_down",
        ),
    ),
    Edge(
        area=WEIGHTS,
        waits="Engine actor for a version to show up on a network disk",
        code=(
            "slime.ext.disk_push.local_copy.LocalCopy",
            "slime.ext.disk_push.local_copy.pull_weights",
        ),
        bounds=("--weight-update-timeout-s", "slime.ext.disk_push.local_copy.VISIBLE_S"),
        deadline="the smaller one",
        raises="WeightSyncError",
        log="trainer: 'engine ... is excluded from the push', with the reason",
        outcome="as for every engine that does not take a push",
        tests=(
            "tests/ext/disk_push/test_local_copy.py::test_unfinished_versions_are_invisible_and_go_with_the_first_push",
        ),
    ),
    Edge(
        area=WEIGHTS,
        waits="Driver for a weight push",
        code=(
            "slime.ray.actor_group.RayTrainGroup.update_weights",
            "slime.ext.disk_push.released_trainer.ReleasedTrainGroup",
        ),
        bounds=("--weight-update-timeout-s", "slime.ray.actor_group.PUSH_MARGIN_S"),
        deadline="",
        raises="DeadlineError",
        log="driver",
        outcome="ends the run",
        tests=(
            "tests/unit/ray/test_deadlines.py::test_a_wait_has_the_deadline_of_its_row",
            "tests/dist/test_ray_waiting.py::test_a_passed_deadline_names_the_work",
        ),
    ),
    Edge(
        area=WEIGHTS,
        waits="Driver for engines started anew, where none took a push",
        code=("slime.ray.actor_group.RayTrainGroup._push_until_taken", "slime.ray.engines.memory.memory_timeout_s"),
        bounds=("--engine-start-timeout-s", "--weight-update-timeout-s", "slime.ray.actor_group.MAX_PUSHES"),
        deadline="the constant counts the pushes of the same weights, the flags bound the start between two",
        raises="WeightSyncError",
        log="driver: 'no engine took the push; retrying'",
        outcome="with --use-fault-tolerance repeated; then ends the run",
        tests=(
            "tests/unit/ray/test_push_policy.py::test_engines_that_die_again_in_the_same_push_are_replaced_again_within_a_bound",
        ),
    ),
    Edge(
        area=WEIGHTS,
        waits="Driver for new engines to take the weights during a rollout",
        code=("slime.ray.actor_group.RayTrainGroup.serve_new_engines",),
        bounds=("--weight-update-timeout-s", "slime.ray.actor_group.MAX_FAILED_RESENDS"),
        deadline="so many failures in a row",
        raises="ProcessError",
        log="driver: 'new engines did not take the weights; they will be tried again'",
        outcome="repeated; then ends the run",
        tests=(
            "tests/unit/ray/test_push_policy.py::test_a_replacement_that_does_not_take_its_first_weights_either_is_replaced_again",
        ),
    ),
    Edge(
        area=WEIGHTS,
        waits="Driver for engines to release their memory or take it back",
        code=("slime.ray.engines.memory.SharedMemory._ask", "slime.ray.train_loop.TrainJob._on_shared_gpus"),
        bounds=("--weight-update-timeout-s",),
        deadline="the manager's; the driver allows restarts of engines too",
        raises="DeadlineError",
        log="manager and driver",
        outcome="ends the run; with --use-fault-tolerance the engine is restarted",
        tests=(
            "tests/unit/ray/test_deadlines.py::test_a_wait_has_the_deadline_of_its_row",
            "tests/dist/test_ray_waiting.py::test_a_passed_deadline_names_the_work",
        ),
    ),
    # Data on disk
    Edge(
        area=DATA,
        waits="Rollout manager for an image behind a URL",
        code=("slime.utils.processing_utils._fetched",),
        bounds=("slime.utils.processing_utils.IMAGE_TIMEOUT_S",),
        deadline="for the connection, for each part, and for all of them",
        raises="DataError",
        log="rollout manager, with the row and the URL",
        outcome="the run does not start",
        tests=("tests/unit/utils/test_processing_utils.py::test_what_a_server_sends_is_bounded_and_checked",),
    ),
    Edge(
        area=DATA,
        waits="Ledger for its disk (full, read-only, slow)",
        code=("slime.ext.ledger.segments.JournalWriter", "slime.ext.ledger.ledger.Ledger"),
        bounds=("--rollout-ledger-timeout-s",),
        deadline="",
        raises="DataError",
        log="manager: a warning for every try, a second apart",
        outcome="repeated, the file cut back to its last whole record; then ends the run, which a restart resumes",
        tests=(
            "tests/ext/ledger/test_segments.py::test_a_full_disk_is_waited_for_and_nothing_is_written_twice",
            "tests/ext/ledger/test_segments.py::test_a_disk_that_stays_full_ends_the_job_with_the_flags_that_help",
        ),
    ),
    Edge(
        area=DATA,
        waits="Checkpoint for the data position, the buffer and the position in the ledger",
        code=(
            "slime.rollout.data_source.RolloutDataSource.save",
            "slime.ext.ledger.ledger.Ledger.save",
            "slime.ray.train_loop.TrainJob.save_if_due",
        ),
        bounds=("--train-timeout-s",),
        deadline="an error of the disk: at once",
        raises="DataError",
        log="driver, with the path",
        outcome="ends the run before the checkpoint counts; the one before is whole; what was half written is removed",
        tests=(
            "tests/ext/ledger/test_disk_full.py::test_a_checkpoint_without_room_names_its_file_and_the_one_before_is_whole",
            "tests/unit/rollout/test_disk_full.py::test_half_a_file_gives_its_room_back",
        ),
    ),
    Edge(
        area=DATA,
        waits="Debug dumps and metrics for their disk",
        code=(
            "slime.observability.dumps.dump_rollout",
            "slime.observability.dumps.save_train_dump",
            "slime.observability.telemetry.log",
        ),
        bounds=(),
        deadline="an error of the disk: at once",
        raises="",
        log="manager, trainer or driver: an error with the path and the flag",
        outcome="the dump or record is lost and the run goes on; with --debug-rollout-only the dump is the purpose, "
        "and its DataError ends the run",
        tests=(
            "tests/unit/rollout/test_disk_full.py::test_a_dump_without_room_is_named_and_the_run_goes_on",
            "tests/unit/rollout/test_disk_full.py::test_a_dump_that_is_the_purpose_of_the_run_ends_it",
            "tests/unit/rollout/test_disk_full.py::test_metrics_without_room_are_lost_and_the_run_goes_on",
        ),
    ),
    # Agents and services
    Edge(
        area=OTHERS,
        waits="Agent adapter for a turn of the engine, its continuations after aborts included",
        code=("slime.agent.adapters.engine.call_sglang_generate", "slime.agent.adapters.common.BaseAdapter._draw"),
        bounds=("slime.utils.http_utils.POST_TIMEOUT_S",),
        deadline="or the adapter's generate_timeout_s",
        raises="TimeoutError",
        log="the client: status 504 in its protocol's words",
        outcome="repeated by the HTTP client; then the agent's own affair",
        tests=("tests/ext/agent/test_openai_adapter.py::test_a_hung_engine_is_a_timeout",),
    ),
    Edge(
        area=OTHERS,
        waits="Agent adapter for chat template and tokenizer to make the prompt of a turn",
        code=("slime.agent.adapters.common.BaseAdapter._prompt_in_time",),
        bounds=("slime.agent.adapters.common.PROMPT_TIMEOUT_S",),
        deadline="",
        raises="TimeoutError",
        log="the client: status 504 in its protocol's words, with the file",
        outcome="not repeated by the HTTP client; then the agent's own affair",
        tests=("tests/ext/agent/test_openai_adapter.py::test_a_template_without_an_end_is_a_timeout",),
    ),
    Edge(
        area=OTHERS,
        waits="Sample for its environment of verifiers: to load, between two turns, for its reward",
        code=(
            "slime.ext.agent.verifiers_data.load",
            "slime.ext.agent.verifiers_env._rollout",
            "slime.ext.agent.verifiers_env.generate",
        ),
        bounds=("slime.ext.agent.verifiers_data.LOAD_LIMIT_S", "--turn-timeout-s", "--rm-timeout-s"),
        deadline="one for each",
        raises="ConfigError",
        log="the environment's name and what it raised, as a grader's failure",
        outcome="one that does not load ends the run; otherwise its sample is FAILED, and --rm-max-failures in a row "
        "end the run",
        tests=(
            "tests/ext/agent/test_verifiers_env.py::test_an_environment_that_does_not_load_in_time_is_refused",
            "tests/ext/agent/test_verifiers_env.py::test_an_environment_that_breaks_costs_its_sample_and_no_other",
        ),
    ),
    Edge(
        area=OTHERS,
        waits="Adapter for turns in flight when a session closes",
        code=("slime.agent.adapters.sessions.SessionBook.shut",),
        bounds=("slime.agent.adapters.sessions.CANCEL_WAIT_S",),
        deadline="wait_timeout first, then the constant after they were cancelled",
        raises="",
        log="manager: how many turns were in flight",
        outcome="they are not part of the samples",
        tests=("tests/ext/agent/test_openai_adapter.py::test_a_turn_in_flight_is_cancelled_when_its_session_ends",),
    ),
    Edge(
        area=OTHERS,
        waits="Anybody for the adapter's server thread to listen (15 s) and to end",
        code=("slime.utils.aiohttp_threaded.run_app_in_thread", "slime.utils.aiohttp_threaded.AppHandle.stop"),
        bounds=("slime.utils.aiohttp_threaded.STOP_TIMEOUT_S",),
        deadline="",
        raises="DeadlineError",
        log="whoever started it",
        outcome="the caller's error",
        tests=("tests/unit/utils/test_aiohttp_threaded.py::test_a_start_that_hangs_ends_at_its_deadline",),
    ),
    Edge(
        area=OTHERS,
        waits="Server for a client to send its request: pages, rollout buffer, adapter, teacher",
        code=(
            "slime.utils.page_server.PageHandler",
            "slime_plugins.rollout_buffer.buffer.patient_protocol",
            "slime.utils.aiohttp_threaded.run_app_in_thread",
            "slime.ext.distill.server.MegatronServer",
        ),
        bounds=(
            "slime.utils.page_server.REQUEST_S",
            "slime.utils.page_server.ANSWER_S",
            "slime_plugins.rollout_buffer.buffer.REQUEST_S",
            "slime.utils.aiohttp_threaded.KEEPALIVE_S",
            "slime.ext.distill.server.BODY_S",
        ),
        deadline="headers, and a body but the adapter's; from the first byte to the last",
        raises="",
        log="nobody",
        outcome="the connection is closed; a page serves MAX_CLIENTS at a time, and closes further ones at once",
        tests=(
            "tests/contracts/test_http_door.py::test_a_client_that_does_not_finish_its_request_is_sent_away",
            "tests/contracts/test_http_door.py::test_a_page_keeps_few_threads_for_silent_clients_and_serves_when_they_are_gone",
        ),
    ),
    Edge(
        area=OTHERS,
        waits="Agent for a command in a sandbox",
        code=("slime.agent.sandbox.runner.IsolatedRunner.run", "slime.agent.sandbox.e2b.E2BSandbox.exec"),
        bounds=("slime.agent.sandbox.runner.KILL_WAIT_S", "slime.agent.sandbox.e2b.RPC_TIMEOUT_S"),
        deadline="the call's timeout (120 s by default), then the constant for the kill or the service",
        raises="SandboxError",
        log="the custom generate function",
        outcome="local: killed with what it started; remote: tried again when it may be",
        tests=(
            "tests/ext/agent/test_sandbox.py::test_commands_and_files_of_the_local_sandbox",
            "tests/ext/agent/test_isolation.py::test_nothing_outlives_the_runner",
            "tests/ext/agent/test_sandbox.py::test_a_command_that_the_service_does_not_answer_is_left_at_its_deadline_and_repeated_when_it_may_be",
        ),
    ),
    Edge(
        area=OTHERS,
        waits="Agent for a sandbox on this machine to start, after a look for a way to isolate it, and to end",
        code=("slime.agent.sandbox.runner.IsolatedRunner", "slime.isolation.view.isolating_command"),
        bounds=(
            "slime.agent.sandbox.runner.START_TIMEOUT_S",
            "slime.isolation.view.PROBE_TIMEOUT_S",
            "slime.agent.sandbox.runner.KILL_WAIT_S",
        ),
        deadline="every process of the sandbox ends with its first one, in the background or not",
        raises="SandboxError",
        log="the custom generate function; a sandbox that does not end is a warning",
        outcome="its processes are killed",
        tests=(
            "tests/ext/agent/test_isolation.py::test_where_nothing_isolates_it_does_not_start",
            "tests/ext/agent/test_isolation.py::test_nothing_outlives_the_runner",
        ),
    ),
    Edge(
        area=OTHERS,
        waits="Program in a sandbox for the address that it may reach",
        code=("slime.agent.sandbox.runner._relay",),
        bounds=("slime.agent.sandbox.runner.CONNECT_TIMEOUT_S",),
        deadline="for the connection; then the sandbox's end",
        raises="",
        log="manager",
        outcome="the program's connection is closed",
        tests=(
            "tests/ext/agent/test_isolation.py::test_a_program_reaches_the_one_address_it_is_given",
            "tests/ext/agent/test_isolation.py::test_a_connection_to_an_address_that_does_not_answer_is_closed",
        ),
    ),
    Edge(
        area=OTHERS,
        waits="Agent harness for its agent to finish",
        code=("slime.agent.sandbox.protocol.exec_and_wait",),
        bounds=("slime.agent.sandbox.protocol.POLL_TIMEOUT_S",),
        deadline="the caller's time_budget_sec; the constant for each look",
        raises="",
        log="the harness's result",
        outcome="the agent is killed; what it did so far counts",
        tests=("tests/ext/agent/test_sandbox.py::test_a_long_job_gives_its_code_and_output_and_ends_at_its_budget",),
    ),
    Edge(
        area=OTHERS,
        waits="Rollout for the rollout buffer service",
        code=("slime_plugins.rollout_buffer.rollout_buffer_example._fill",),
        bounds=(
            "slime_plugins.rollout_buffer.rollout_buffer_example.REQUEST_TIMEOUT_S",
            "--fetch-trajectory-retry-times",
            "--rollout-timeout-s",
        ),
        deadline="a request; empty answers in a row; all in all",
        raises="DeadlineError",
        log="manager, with how many items are there",
        outcome="repeated; then ends the run",
        tests=(
            "tests/unit/slime_plugins/rollout_buffer/test_rollout_buffer_example.py::test_a_service_without_data_ends_the_rollout_after_the_retries",
            "tests/unit/slime_plugins/rollout_buffer/test_rollout_buffer_example.py::test_a_service_without_data_ends_the_rollout_at_its_deadline",
        ),
    ),
    Edge(
        area=OTHERS,
        waits="Rollout buffer service for its generator to end",
        code=("slime_plugins.rollout_buffer.buffer.GeneratorProcess",),
        bounds=("slime_plugins.rollout_buffer.buffer.STOP_WAIT_S",),
        deadline="after SIGTERM, and once more after SIGKILL",
        raises="",
        log="the service",
        outcome="killed with its workers",
        tests=(
            "tests/unit/slime_plugins/rollout_buffer/test_buffer.py::test_a_generator_that_ignores_its_end_is_killed",
        ),
    ),
)

OUTSIDE = {
    "slime.__main__": "a command for people: nvidia-smi has 60 s",
    "slime.ext.record.run_record": "git has 10 s at the start",
    "slime.ext.record.writer": "no step waits for the record; its last write has 30 s",
    "slime.ext.record.prometheus_page": "a page for people: an engine has SCRAPE_TIMEOUT_S, the run never waits",
    "slime.utils.misc": "exec_command runs what its caller wants for as long as it takes, a whole training run too",
    "slime.ext.plan.fit": "a plan is no run: nvidia-smi has 60 s",
    "slime.ext.plan.recipe": "a plan is no run: a recipe with recorders for commands has TIMEOUT_S to print its flags",
    "slime.isolation.__main__": "a program of its own, ended by the runner or by the plan's TIMEOUT_S",
    "slime.isolation.namespaces": "a program of its own: START_TIMEOUT_S of the runner, or the plan's",
    "slime.isolation.supervisor": "serves until the runner hangs up",
    "slime.backends.sglang_utils.cpu_shim.transfer_engine": "SGLang's own transfer of caches, with SGLang's deadlines",
}
"""Modules that wait, and need no row."""

UNTIMED = {
    "slime.agent.sandbox.runner._relay: asyncio.gather": "the sandbox's end cancels it",
    "slime.utils.aiohttp_threaded.run_app_in_thread.serve: finished.wait": "a server serves until stop() sets it",
    "slime.observability.trace_utils.trace_span.__enter__: _open_spans.get": "a ContextVar, no queue",
    "slime.observability.trace_utils.trace_event: _open_spans.get": "a ContextVar, no queue",
    "slime.ray.distributed_post.DistributedPost.__call__: poster.post.remote": "http_utils.post waits for it, timed",
    "slime.ray.engines.monitor.HealthMonitor._loop: self._running.wait": "paused until resume() or stop()",
    "slime.rollout.control_client.abort_engines: asyncio.gather": "every request has CONTROL_TIMEOUT_S",
    "slime.rollout.control_client.engine_loads: asyncio.gather": "every request has CONTROL_TIMEOUT_S",
    "slime.rollout.fully_async_rollout.AsyncRolloutWorker._produce: asyncio.timeout": "collect() is the timed side",
    "slime.rollout.fully_async_rollout.AsyncRolloutWorker._produce: self.pool.room.wait": "collect() is timed",
    "slime.rollout.pool.result_of: task.result": "called when the task is done",
    "slime.rollout.sglang_rollout.eval_rollout: asyncio.gather": "every data set has a LongWait",
    "slime.rollout.sglang_rollout.generate_and_rm_group: asyncio.gather": "rewards have --rm-timeout-s",
    "slime.rollout.sglang_rollout._run_entries: asyncio.gather": "requests are timed, and so is the rollout",
    "slime.ext.environments.multi_turn._Player.observe: asyncio.gather": "every call has --turn-timeout-s",
    "slime.utils.misc.exec_command: subprocess.run": "a whole training run may be the command",
    "slime.ext.fast_push.channel.WeightChannel.wait: work.wait": "called when the broadcast is done",
    "slime.ext.recovery.supervisor._run: child.wait": "for a driver, as long as it runs",
    "slime.ext.ledger.segments.JournalWriter._serve: self._wake.wait": "a daemon thread; put and close wake it",
    "slime.rollout.on_policy_distillation.reward_func: asyncio.gather": "every request has REQUEST_TIMEOUT_S",
    "slime.rollout.rm_hub.batched_async_rm: asyncio.gather": "every grading has --rm-timeout-s",
    "slime.rollout.rm_hub.policy._Worker.run: self._waiting.get": "a daemon thread without work",
    "slime.rollout.control_client.engine_versions: asyncio.gather": "every request has CONTROL_TIMEOUT_S",
    "slime_plugins.rollout_buffer.generator.base_generator.Worker.run: asyncio.gather": "every post is timed",
    "slime_plugins.rollout_buffer.generator.base_generator.run_rollout: worker.join": "the service ends the generator",
}
"""Waits without a deadline of their own, and why that is right."""
