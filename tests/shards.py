"""What `make test` leaves to `make prove`, and the shards in which `make prove` runs it.

`make test` takes every test that no rule below names, and of a parametrized test under `SAMPLES` a few cases, evenly spread. A shard runs
its tests whole and at full effort (`tests/effort.py`), in at most 12 minutes on two cores. `make prove SHARD=3` runs one, `make prove` all.

    python -m tests.shards            the table
    python -m tests.shards draw       the shard that `.ci/run` takes: among those whose code the last 50 commits touched, by the commit's hash
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMITS = 50  # that the draw looks at


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One run of at most 12 minutes.

    Attributes:
        tests: prefixes of node ids, each a file, a test or one case of it.
        sources: folders of `src/phalanx` whose change asks for this shard; "" is all of them.
        holding: a word that the node id must hold, such as the name of an engine.
        part: (k, n): every n-th of the tests, beginning with the k-th, so that several shards share a family.
        needs: make targets that install what the tests need beyond Python; tests skip themselves with a line where it is absent.
    """

    title: str
    tests: tuple[str, ...]
    sources: tuple[str, ...] = ("",)
    holding: str = ""
    part: tuple[int, int] = (0, 1)
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A parametrized test of which `make test` runs a few cases.

    Attributes:
        tests: the prefix of its node ids.
        keep: how many cases, evenly spread over the list.
    """

    tests: str
    keep: int


# Of these `make test` runs a few cases; the shards run all.
SAMPLES: tuple[Sample, ...] = (
    Sample(tests="tests/contract/test_kubernetes_hostile.py::test_a_hostile_state_has_one_line_", keep=8),
    Sample(tests="tests/contract/test_kubernetes_hostile.py::test_a_fault_of_the_server_costs_no_attempt", keep=2),
    Sample(tests="tests/unit/test_kubernetes_objects.py::test_every_object_is_valid_by_the_strict_schemas_of[", keep=2),
    Sample(tests="tests/contract/test_store_crash.py::test_store_survives_a_kill[", keep=4),
    Sample(tests="tests/contract/test_store_crash.py::test_postgres_survives_a_kill_of_its_head[", keep=2),
    Sample(tests="tests/contract/test_store_crash.py::test_history_survives_a_kill[", keep=2),
    Sample(tests="tests/contract/test_store_crash.py::test_history_on_postgres_survives_a_kill_of_its_head[", keep=1),
    Sample(tests="tests/contract/test_store_crash.py::test_blobs_survive_a_kill[", keep=3),
    Sample(tests="tests/contract/test_store_crash.py::test_logs_survive_a_kill[", keep=3),
    Sample(
        tests="tests/contract/test_backups.py::test_a_restore_that_is_killed_leaves_the_old_records_or_the_new_ones[",
        keep=3,
    ),
    Sample(
        tests="tests/contract/test_backups.py::test_a_backup_that_is_killed_leaves_a_whole_file_or_none_under_its_name[",
        keep=2,
    ),
    Sample(tests="tests/contract/test_backups.py::test_what_was_backed_up_comes_back_in_either_database[", keep=2),
    Sample(
        tests="tests/contract/test_backups.py::test_a_restore_of_a_lost_database_that_is_killed_lets_no_head_begin_anew[",
        keep=1,
    ),
    Sample(
        tests="tests/contract/test_store_upgrade.py::test_an_upgrade_that_is_killed_anywhere_goes_on_at_the_next_start[",
        keep=3,
    ),
    Sample(
        tests="tests/contract/test_store_upgrade.py::test_an_upgrade_of_postgres_that_is_killed_has_changed_nothing_and_goes_on_at_the_next_start[",
        keep=1,
    ),
    Sample(
        tests="tests/contract/test_store_postgres.py::test_a_commit_that_fails_anywhere_is_refused_whole_and_may_be_repeated[",
        keep=4,
    ),
    Sample(tests="tests/crash/test_kill_points.py::test_a_serving_head_is_killed[", keep=2),
    Sample(tests="tests/crash/test_kill_points.py::test_a_head_is_killed_while_it_makes_its_home[", keep=1),
    Sample(tests="tests/e2e/test_drills.py::test_cancel_leaves_nothing_behind_even_of_a_double_fork[", keep=1),
    Sample(tests="tests/e2e/test_engine_errors.py::", keep=5),
    Sample(tests="tests/e2e/test_processes.py::", keep=24),
    Sample(tests="tests/e2e/test_supervisor_process.py::test_what_cannot_run_is_refused_with_its_name[", keep=2),
    Sample(tests="tests/e2e/test_failure_rules.py::test_death_is_judged_by_its_evidence[", keep=3),
    Sample(tests="tests/e2e/test_zygote.py::test_a_warm_script_does_what_a_cold_one_does[", keep=3),
    Sample(tests="tests/hostile/test_files.py::test_spoilt_file_ends_in_one_clear_line[", keep=2),
    Sample(tests="tests/hostile/test_files.py::test_spoilt_state_folder_ends_in_one_clear_line[", keep=3),
    Sample(tests="tests/property/test_load_traces.py::test_trace[", keep=4),
    Sample(tests="tests/property/test_storms.py::test_storm[", keep=12),
    Sample(tests="tests/property/test_storms.py::test_storm_under_another_policy[", keep=6),
    Sample(tests="tests/unit/test_hostile_yaml.py::test_is_refused_in_one_printable_line[", keep=20),
)

# These are campaigns as a whole: their subjects have smaller tests in `make test`.
CAMPAIGNS: tuple[str, ...] = (
    "tests/contract/test_kubernetes_api.py",
    "tests/contract/test_kubernetes_faults.py",
    "tests/contract/test_kubernetes_namespaces.py",
    "tests/contract/test_kubernetes_rights.py",
    "tests/e2e/test_kubernetes.py",
    "tests/e2e/test_kubernetes_resident.py",
    "tests/e2e/test_kubernetes_kueue.py",
    "tests/e2e/test_kubernetes_own_image.py",
    "tests/e2e/test_kubernetes_hostile_real.py",
    "tests/e2e/test_kubernetes_head_in_pod.py",
    "tests/contract/test_backups.py::test_a_slow_disk_between_two_statements_ends_neither_a_backup_nor_a_restore",
    "tests/contract/test_dashboard_browser.py",
    "tests/contract/test_dashboard_types.py",
    "tests/contract/test_kubernetes_tools.py",
    "tests/dashboard/",
    "tests/contract/test_programs_browser.py",
    "tests/contract/test_provider_browser.py",
    "tests/e2e/test_clouds_campaign.py",
    "tests/e2e/test_cloud_course.py",
    "tests/e2e/test_cloud_console.py",
    "tests/e2e/test_cloud_refusals.py",
    "tests/e2e/test_upgrade.py",
    "tests/contract/test_engine_contract.py::test_a_preempted_training_saves_and_resumes_where_it_was",
    "tests/contract/test_engine_contract.py::test_a_training_whose_node_dies_goes_on_elsewhere_from_its_checkpoint",
    "tests/contract/test_packages_contract.py",
    "tests/contract/test_vllm.py",
    "tests/e2e/test_vllm_gateway.py",
    "tests/e2e/test_canary_rollout.py",
    "tests/property/test_canary_statistics.py::test_at_most",
    "tests/property/test_canary_statistics.py::test_how_soon",
    "tests/e2e/test_gateway_soak_campaign.py",
    "tests/e2e/test_gateway_continuation.py::test_a",
    "tests/e2e/test_gateway_continuation.py::test_how",
    "tests/e2e/test_tide.py",
    "tests/contract/test_store_postgres.py::test_kill_9_of_the_server_under_load_loses_nothing_acknowledged",
    "tests/crash/test_kill_points_postgres.py",
    "tests/crash/test_kill_points_ray.py",
    "tests/crash/test_order.py",
    "tests/crash/test_order_postgres.py",
    "tests/contract/test_api_notify.py::test_a_redirect_of_a_users_service_leads_to_no_private_address",
    "tests/contract/test_api_notify.py::test_a_users_service_whose_reply_does_not_end_takes_neither_time_nor_memory_of_the_head",
    "tests/e2e/test_calibrate.py",
    "tests/e2e/test_canaries.py",
    "tests/e2e/test_cli_arrays.py::test_array_runs_every_element_with_its_own_variables_and_outputs",
    "tests/e2e/test_cli_waste.py",
    "tests/e2e/test_demo.py",
    "tests/e2e/test_drills.py::test_a_script_that_knows_only_torch_distributed_runs_unchanged",
    "tests/e2e/test_drills.py::test_head_away_long_past_the_lease_costs_only_what_was_not_saved",
    "tests/e2e/test_drills.py::test_head_killed_and_back_within_the_lease_costs_no_step_and_no_log_line",
    "tests/e2e/test_drills.py::test_no_step_is_begun_by_a_node_that_slept_past_its_lease",
    "tests/e2e/test_drills.py::test_node_killed_in_mid_training_resumes_elsewhere_and_repeats_its_losses",
    "tests/e2e/test_drills.py::test_planned_stop_of_the_head_is_not_noticed_by_a_job_even_past_the_lease",
    "tests/e2e/test_energy.py",
    "tests/e2e/test_data_campaign.py",
    "tests/e2e/test_data_mount_campaign.py",
    "tests/e2e/test_object_checkpoints_campaign.py",
    "tests/e2e/test_object_outputs_campaign.py",
    "tests/e2e/test_cloud_stores_campaign.py",
    "tests/contract/test_object_stores_campaign.py",
    "tests/unit/test_output_objects.py",
    "tests/e2e/test_executor_campaign.py",
    "tests/e2e/test_hydra.py",
    "tests/e2e/test_sweep.py",
    "tests/e2e/test_submitit_parity.py",
    "tests/e2e/test_node_tests.py",
    "tests/e2e/test_operator_hooks.py",
    "tests/e2e/test_ssh.py",
    "tests/e2e/test_batches_campaign.py",
    "tests/e2e/test_gateway_prefill_campaign.py",
    "tests/e2e/test_serving_campaign.py",
    "tests/e2e/test_web_programs_campaign.py",
    "tests/e2e/test_dev.py",
    "tests/e2e/test_ssh_lab.py",
    "tests/e2e/test_hangs.py",
    "tests/e2e/test_history.py",
    "tests/e2e/test_head.py::test_a_job_with_the_number_of_a_job_that_a_restore_lost_has_none_of_its_output",
    "tests/e2e/test_head.py::test_another_fleet_leaves_no_ghosts_of_the_one_before",
    "tests/e2e/test_head.py::test_head_that_was_stopped_for_longer_than_a_lease_declares_nobody_dead",
    "tests/e2e/test_head.py::test_lost_token_is_made_again_at_the_next_start",
    "tests/e2e/test_head.py::test_output_of_jobs_before_a_lost_database_is_no_other_jobs",
    "tests/e2e/test_heads.py",
    "tests/e2e/test_images.py",
    "tests/e2e/test_jobs_as_owners.py",
    "tests/e2e/test_job_limits.py::test_version_2_in_user_mode_linux",
    "tests/e2e/test_join.py",
    "tests/e2e/test_relay.py",
    "tests/e2e/test_uploads.py",
    "tests/e2e/test_loader_libraries.py",
    "tests/e2e/test_lab.py",
    "tests/e2e/test_login_elsewhere.py",
    "tests/e2e/test_lab_slurm.py",
    "tests/e2e/test_lab_slurm_users.py",
    "tests/e2e/test_slurm_scripts.py",
    "tests/e2e/test_live_scheduling.py::test_elastic_job_starts_wide_shrinks_for_another_and_grows_again",
    "tests/e2e/test_live_scheduling.py::test_gang_of_a_drained_node_gets_its_place_back_before_a_newcomer",
    "tests/e2e/test_live_scheduling.py::test_gang_of_higher_priority_preempts_a_training_job_which_saves_and_resumes",
    "tests/e2e/test_live_scheduling.py::test_head_that_comes_back_schedules_as_it_was_told_once",
    "tests/e2e/test_measured_topology.py",
    "tests/e2e/test_planted_environment.py",
    "tests/e2e/test_preflight.py",
    "tests/e2e/test_rank_order.py",
    "tests/e2e/test_ray.py",
    "tests/e2e/test_ray_redis.py",
    "tests/e2e/test_renewal_process.py",
    "tests/e2e/test_requirements.py",
    "tests/e2e/test_retention.py",
    "tests/e2e/test_run_plan.py::test_layout_and_machine_reach_every_rank",
    "tests/e2e/test_sbatch.py::test_torch_reduces_over_the_tasks_of_a_step",
    "tests/e2e/test_slurm.py",
    "tests/e2e/test_slurm_resident.py",
    "tests/e2e/test_soak.py",
    "tests/e2e/test_software.py",
    "tests/e2e/test_frameworks_on_engines.py",
    "tests/e2e/test_training_on_engines.py",
    "tests/e2e/test_usage_scenarios.py",
    "tests/e2e/test_wide.py",
    "tests/scenario/test_history_recorder.py::test_two_days_are_rolled_up_and_old_values_are_dropped",
    "tests/simulation/test_seeds.py::test_a_fixed_campaign_meets_every_edge_that_is_not_rare_and_every_fault_in_every_state",
    "tests/simulation/test_invoice_of_a_month.py::test_a_month_costs_what_the_events_say",
    "tests/torch/test_calibrate.py",
    "tests/torch/test_layouts.py",
    "tests/torch/test_checkpointer.py::test_kill_in_mid_save_leaves_only_whole_checkpoints",
    "tests/torch/test_checkpointer.py::test_example_gpt_learns_and_repeats_itself_on_another_number_of_ranks",
    "tests/torch/test_apart.py::test_a_step_made_again_in_place_keeps_the_first_checkpoint_where_every_node_still_has_its_part",
    "tests/hostile/test_requests.py::test_every_number_at_every_edge_is_taken_or_refused",
    "tests/hostile/test_requests.py::test_good_requests_are_taken",
    "tests/hostile/test_requests.py::test_a_planted_fault_is_found_and_told_with_a_line_that_repeats_it",
    "tests/simulation/test_planted.py::test_without_them_the_same_seeds_are_clean",
    "tests/unit/test_fragmentation.py::test_the_published_share_of_openb_is_reached",
    "tests/unit/test_simulator_calibration.py::test_philly_week_1_through_the_whole_lifecycle",
)

ENGINES = ("engines", "node", "controller", "wire", "ports", "app")
HEAD = ("api", "app", "controller", "store", "failpoints", "core/state", "core/lifecycle")

SHARDS: tuple[Shard, ...] = (
    *(
        Shard(
            title="kill -9 of a head on SQLite", tests=("tests/crash/test_kill_points.py",), sources=HEAD, part=(k, 3)
        )
        for k in range(3)
    ),
    *(
        Shard(
            title="kill -9 of a head on PostgreSQL",
            tests=("tests/crash/test_kill_points_postgres.py",),
            sources=HEAD,
            part=(k, 3),
            needs=("postgres-tools",),
        )
        for k in range(3)
    ),
    Shard(
        title="kill -9 of a head that brings Ray",
        tests=("tests/crash/test_kill_points_ray.py",),
        sources=("engines/ray", "app"),
        needs=("ray",),
    ),
    Shard(
        title="order of system calls: on the disk before the answer",
        tests=("tests/crash/test_order.py", "tests/crash/test_order_postgres.py"),
        sources=HEAD,
        needs=("trace-tools", "postgres-tools"),
    ),
    *(
        Shard(title="drill: fresh seeds", tests=("tests/simulation/test_seeds.py::test_seeds_",), part=(k, 3))
        for k in range(3)
    ),
    Shard(
        title="drill: planted bugs",
        tests=("tests/simulation/test_planted.py",),
    ),
    Shard(
        title="drill: every edge and every fault in every state",
        tests=(
            "tests/simulation/test_seeds.py::test_a_",
            "tests/simulation/test_false",
            "tests/simulation/test_late",
            "tests/simulation/test_waited",
        ),
    ),
    Shard(
        title="clouds: creates under faults",
        tests=(
            "tests/e2e/test_clouds_campaign.py",
            "tests/e2e/test_cloud_course.py",
            "tests/e2e/test_cloud_console.py",
            "tests/e2e/test_cloud_refusals.py",
        ),
        sources=(
            "providers/aws",
            "providers/azure",
            "providers/clouds",
            "providers/google",
            "controller",
            "core/fleet",
        ),
        needs=("s3-tools", "compiler-tools"),
    ),
    Shard(
        title="money: the invoice of a simulated month",
        tests=("tests/simulation/test_invoice_of_a_month.py",),
        sources=("core/accounting", "controller", "core/fleet"),
    ),
    Shard(
        title="properties, fresh examples",
        tests=(
            "tests/property",
            "tests/unit/test_fragmentation.py",
            "tests/unit/test_simulator_calibration.py",
            "tests/scenario/test_supervisor_chaos.py",
            "tests/unit/test_cli_plan_schedule.py",
        ),
    ),
    Shard(
        title="stores: kills, damage, disks, models",
        tests=(
            "tests/contract/test_store_crash.py",
            "tests/contract/test_store_damage.py",
            "tests/contract/test_store_model.py",
            "tests/contract/test_store_disk.py",
            "tests/contract/test_logs_contract.py",
        ),
        sources=("store", "ports", "failpoints", "core/state"),
        needs=("postgres-tools",),
    ),
    Shard(
        title="stores: backups, upgrades, PostgreSQL, elections",
        tests=(
            "tests/contract/test_backups.py",
            "tests/contract/test_store_upgrade.py",
            "tests/contract/test_store_postgres.py",
            "tests/contract/test_election.py",
        ),
        sources=("store", "ports", "failpoints", "core/state", "app"),
        needs=("postgres-tools",),
    ),
    Shard(
        title="hostile input: 30,000 requests, files, every caller on every route",
        tests=(
            "tests/hostile/test_requests.py",
            "tests/hostile/test_files.py",
            "tests/contract/test_access_matrix.py",
            "tests/unit/test_hostile_yaml.py",
        ),
        sources=("api", "wire", "core/access", "controller", "cli"),
    ),
    Shard(
        title="dashboard in a real Chromium: sign-in, every page, fifty scripts in names, ten questions",
        tests=(
            "tests/dashboard/",
            "tests/contract/test_dashboard_browser.py",
            "tests/contract/test_dashboard_types.py",
            "tests/contract/test_programs_browser.py",
            "tests/contract/test_provider_browser.py",
            "tests/e2e/test_login_elsewhere.py",
        ),
        sources=("web", "api", "wire"),
        needs=("browser-tools",),
    ),
    Shard(
        title="alert rules in a real Prometheus on a real head",
        tests=("tests/e2e/test_prometheus.py",),
        sources=("api/routes", "cli/monitoring", "wire"),
        needs=("prometheus-tools",),
    ),
    Shard(
        title="the Debian package and the image, in a Debian of its own",
        tests=("tests/packaging/test_deb.py", "tests/packaging/test_image.py"),
        sources=("app", "cli/cluster", "core"),
        needs=("deb-tools", "image-tools"),
    ),
    Shard(
        title="an upgrade from earlier commits, and the way back",
        tests=("tests/e2e/test_upgrade.py",),
        sources=("app", "store", "engines/local", "node/shell"),
    ),
    Shard(
        title="hostile input: every option of every command",
        tests=("tests/hostile/test_words.py",),
        sources=("cli", "client"),
    ),
    Shard(
        title="processes under both containments",
        tests=(
            "tests/e2e/test_processes.py",
            "tests/e2e/test_supervisor_process.py",
            "tests/e2e/test_zygote.py",
            "tests/e2e/test_spool.py",
            "tests/e2e/test_failure_rules.py",
            "tests/e2e/test_job_limits.py",
            "tests/e2e/test_jobs_as_owners.py",
            "tests/e2e/test_planted_environment.py",
        ),
        sources=("node", "engines/local", "wire"),
        needs=("uml-tools",),
    ),
    Shard(
        title="command line against a real head",
        tests=(
            "tests/e2e/test_cli_",
            "tests/e2e/test_head.py",
            "tests/e2e/test_head_limits.py",
            "tests/e2e/test_canaries.py",
            "tests/e2e/test_run_plan.py",
            "tests/e2e/test_sbatch.py",
            "tests/e2e/test_requirements.py",
            "tests/e2e/test_software.py",
            "tests/e2e/test_engine_errors.py",
            "tests/e2e/test_tutorial.py",
            "tests/e2e/test_retention.py",
            "tests/e2e/test_history.py",
            "tests/scenario/test_history_recorder.py::test_two_days_are_rolled_up_and_old_values_are_dropped",
        ),
        sources=("cli", "client", "api", "app", "node"),
        needs=("modules-tools", "uv-tools"),
    ),
    Shard(
        title="rollouts by shares of the sessions: 1,000 without a difference, and a bad revision before a real head",
        tests=("tests/property/test_canary_statistics.py", "tests/e2e/test_canary_rollout.py"),
        sources=("gateway", "core/lifecycle", "controller/services"),
    ),
    Shard(
        title="gateway: streams whose replica fails, two gateways under faults, restarts, and the tide",
        tests=(
            "tests/e2e/test_gateway_continuation.py",
            "tests/e2e/test_gateway_soak_campaign.py",
            "tests/e2e/test_tide.py",
        ),
        sources=("gateway",),
    ),
    Shard(
        title="vLLM itself: the protocol of engines, and two replicas behind a gateway",
        tests=("tests/contract/test_vllm.py", "tests/e2e/test_vllm_gateway.py"),
        sources=("gateway",),
        needs=("vllm-tools",),
    ),
    Shard(
        title="Kubernetes itself: API server, scheduler and controllers, with nodes of the tests",
        tests=("tests/contract/test_kubernetes_tools.py",),
        sources=("engines", "ports"),
        needs=("kubernetes-tools",),
    ),
    Shard(
        title="MPI, and the examples of other frameworks",
        tests=("tests/e2e/test_mpi.py", "tests/e2e/test_examples.py::test_e"),
        sources=("node", "core/work"),
        needs=("mpi-tools",),
    ),
    Shard(
        title="a hundred starts of JAX with one slow node",
        tests=("tests/e2e/test_examples.py::test_jax_starts",),
        sources=("node",),
    ),
    Shard(
        title="several heads over one PostgreSQL",
        tests=("tests/e2e/test_heads.py",),
        sources=HEAD,
        needs=("postgres-tools",),
    ),
    Shard(
        title="training through faults: drills, preemption, hangs, demo; energy of jobs",
        tests=(
            "tests/e2e/test_drills.py",
            "tests/e2e/test_live_scheduling.py",
            "tests/e2e/test_hangs.py",
            "tests/e2e/test_energy.py",
            "tests/e2e/test_node_tests.py",
            "tests/e2e/test_operator_hooks.py",
            "tests/e2e/test_demo.py",
        ),
    ),
    Shard(
        title="load: calibration, 128 ranks, soak, 200 pods on 40 nodes",
        tests=(
            "tests/e2e/test_calibrate.py",
            "tests/e2e/test_wide.py",
            "tests/e2e/test_soak.py",
            "tests/e2e/test_openb_placement.py",
        ),
    ),
    Shard(
        title="states of GPUs against what twenty kinds of processes do",
        tests=("tests/e2e/test_usage_scenarios.py",),
        sources=("core/accounting", "controller", "node/probes", "node/member"),
    ),
    Shard(
        title="phalanx.Executor at length: killed nodes, workers and programs, a million tasks; submitit's own tests, Hydra",
        tests=(
            "tests/e2e/test_executor_campaign.py",
            "tests/e2e/test_submitit_parity.py",
            "tests/e2e/test_hydra.py",
        ),
        sources=("executor", "submitit", "api/live", "node/shell"),
    ),
    Shard(
        title="datasets: eight nodes over shaped links, accounts of several users, a killed program, an S3 server, mounts of it",
        tests=(
            "tests/e2e/test_data_campaign.py",
            "tests/e2e/test_data_mount_campaign.py",
            "tests/unit/test_object_store_source.py",
        ),
        sources=("node/data", "node/prepare", "api/nodes"),
        needs=("s3-tools", "mount-tools"),
    ),
    Shard(
        title="models served without a job file, over two nodes and from a job's outputs; chats with them",
        tests=("tests/e2e/test_serving_campaign.py",),
        sources=("cli/serve", "cli/jobs", "client", "core/lifecycle"),
    ),
    Shard(
        title="batches: engine, driver and head killed, preemption, rights, wrong files, OpenAI's client",
        tests=("tests/e2e/test_batches_campaign.py",),
        sources=("batches", "gateway", "cli/serve"),
    ),
    Shard(
        title="prompts that one replica reads and another answers, with vLLM's and SGLang's protocol: either side fails",
        tests=("tests/e2e/test_gateway_prefill_campaign.py",),
        sources=("gateway", "cli/serve", "core/work"),
    ),
    Shard(
        title="messages to URLs of users: a redirect to a private address, a reply without an end",
        tests=("tests/contract/test_api_notify.py",),
        sources=("providers/notifications",),
    ),
    Shard(
        title="a notebook and an editor of jobs in a real Chromium, through the head",
        tests=("tests/e2e/test_web_programs_campaign.py",),
        sources=("api/programs", "api/live", "node/shell", "web"),
        needs=("ide-tools",),
    ),
    Shard(
        title="checkpoints and outputs in an S3 server: a lost node, a store that fails, a link that breaks, changed bytes",
        tests=(
            "tests/e2e/test_object_checkpoints_campaign.py",
            "tests/e2e/test_object_outputs_campaign.py",
            "tests/unit/test_checkpoint_objects.py",
            "tests/unit/test_output_objects.py",
        ),
        sources=("node/data", "node/transfer", "node/prepare", "torch"),
        needs=("s3-tools",),
    ),
    Shard(
        title="data, mounts, checkpoints, outputs and their removal in S3, Google Cloud Storage and Azure: one server of each",
        tests=("tests/contract/test_object_stores_campaign.py", "tests/e2e/test_cloud_stores_campaign.py"),
        sources=("node/data", "node/transfer", "node/prepare", "cli/transfers"),
        needs=("s3-tools", "cloud-tools", "mount-tools"),
    ),
    Shard(
        title="ssh, scp, rsync and git to a job without an open port; sessions of phalanx dev",
        tests=("tests/e2e/test_ssh.py", "tests/e2e/test_ssh_lab.py", "tests/e2e/test_dev.py"),
        sources=("cli/jobs", "api/live", "node/shell", "client"),
        needs=("ssh-tools", "lab-tools"),
    ),
    *(
        Shard(
            title="examples: one real program for each use, killed once",
            tests=("tests/examples/test_uses.py",),
            sources=("executor", "node/shell", "cli/jobs"),
            part=(k, 2),
        )
        for k in range(2)
    ),
    Shard(title="sweeps", tests=("tests/e2e/test_sweep.py",), sources=("sweep", "cli/sweep")),
    Shard(title="phalanx.torch", tests=("tests/torch",), sources=("torch", "wire")),
    Shard(
        title="phalanx.torch.sampler in torchdata, Grain and litdata",
        tests=("tests/e2e/test_loader_libraries.py",),
        sources=("torch",),
    ),
    Shard(
        title="engine contract: local and joined",
        tests=("tests/contract/test_engine_contract.py",),
        sources=ENGINES,
        holding="local",
        needs=("slurm-tools", "redis-tools", "ray"),
    ),
    Shard(
        title="engine contract: Ray",
        tests=("tests/contract/test_engine_contract.py",),
        sources=ENGINES,
        holding="ray",
        needs=("slurm-tools", "redis-tools", "ray"),
    ),
    Shard(
        title="engine contract: Slurm",
        tests=("tests/contract/test_engine_contract.py",),
        sources=ENGINES,
        holding="slurm",
        needs=("slurm-tools", "redis-tools", "ray"),
    ),
    Shard(
        title="engine contract: Kubernetes, with a fake and with the real API server",
        tests=("tests/contract/test_engine_contract.py",),
        sources=ENGINES,
        holding="on_kubernetes",
        needs=("kubernetes-tools",),
    ),
    Shard(
        title="Kubernetes: hostile states of a cluster, queues of Kueue, and the schemas of ten releases",
        tests=(
            "tests/contract/test_kubernetes_hostile.py",
            "tests/e2e/test_kubernetes.py",
            "tests/e2e/test_kubernetes_resident.py",
            "tests/e2e/test_kubernetes_kueue.py",
            "tests/e2e/test_kubernetes_own_image.py",
            "tests/e2e/test_kubernetes_hostile_real.py",
            "tests/e2e/test_kubernetes_head_in_pod.py",
            "tests/e2e/test_kubernetes_campaign.py",
            "tests/unit/test_kubernetes_objects.py",
            "tests/packaging/test_kubernetes_files.py",
        ),
        sources=("engines/kubernetes",),
        needs=("kubernetes-tools", "kubectl-tools", "lab-tools"),
    ),
    Shard(
        title="the Kubernetes API: the client under faults, and the same contract on the fake and on a real server",
        tests=(
            "tests/contract/test_kubernetes_api.py",
            "tests/contract/test_kubernetes_faults.py",
            "tests/contract/test_kubernetes_namespaces.py",
            "tests/contract/test_kubernetes_rights.py",
        ),
        sources=("engines/kubernetes",),
        needs=("kubernetes-tools",),
    ),
    Shard(
        title="lab: hosts that share no directory",
        tests=(
            "tests/e2e/test_lab.py",
            "tests/e2e/test_join.py",
            "tests/e2e/test_relay.py",
            "tests/e2e/test_renewal_process.py",
            "tests/e2e/test_preflight.py",
            "tests/e2e/test_uploads.py",
            "tests/e2e/test_measured_topology.py",
            "tests/e2e/test_rank_order.py",
        ),
        sources=("node", "api", "app", "engines"),
        needs=("lab-tools",),
    ),
    Shard(
        title="Slurm: real daemons, several users",
        tests=(
            "tests/e2e/test_lab_slurm.py",
            "tests/e2e/test_lab_slurm_users.py",
            "tests/e2e/test_slurm.py",
            "tests/e2e/test_slurm_resident.py",
            "tests/contract/test_slurm_here.py",
            "tests/contract/test_slurm_limits_here.py",
        ),
        sources=("engines/slurm", "node", "app"),
        needs=("lab-tools", "slurm-tools"),
    ),
    Shard(
        title="#SBATCH scripts beside real Slurm",
        tests=("tests/e2e/test_slurm_scripts.py",),
        sources=("node", "core", "cli"),
        needs=("lab-tools", "slurm-tools"),
    ),
    Shard(
        title="Ray: real daemons, Redis",
        tests=("tests/e2e/test_ray.py", "tests/e2e/test_ray_redis.py"),
        sources=("engines/ray", "node", "app"),
        needs=("lab-tools", "redis-tools", "ray"),
    ),
    Shard(
        title="training on servers that share no directory, on every engine",
        tests=("tests/e2e/test_training_on_engines.py",),
        sources=ENGINES,
        needs=("kubernetes-tools", "lab-tools", "slurm-tools", "ray"),
    ),
    Shard(
        title="MPI, JAX and TensorFlow over two nodes, on every engine",
        tests=("tests/e2e/test_frameworks_on_engines.py",),
        sources=("node", "core/work", "engines"),
        needs=("mpi-tools", "lab-tools", "slurm-tools", "ray"),
    ),
    Shard(
        title="images and packages",
        tests=("tests/e2e/test_images.py", "tests/contract/test_packages_contract.py"),
        sources=("node", "engines"),
        needs=("image-tools", "lab-tools", "slurm-tools", "ray"),
    ),
)


# Cases of parametrized tests: the prefix of their node ids, and a word in them.
CAMPAIGN_CASES: tuple[tuple[str, str], ...] = (("tests/contract/test_engine_contract.py::", "on_kubernetes"),)


def spread(count: int, keep: int) -> set[int]:
    """`keep` places out of `count`, evenly apart, first and last among them."""
    if keep >= count:
        return set(range(count))
    if keep == 1:
        return {0}
    return {round(place * (count - 1) / (keep - 1)) for place in range(keep)}


def left_out(node_ids: Sequence[str]) -> set[str]:
    """Which of these tests `make test` leaves to `make prove`."""
    chosen = {node for node in node_ids if node.startswith(CAMPAIGNS)}
    chosen |= {node for node in node_ids for prefix, word in CAMPAIGN_CASES if node.startswith(prefix) and word in node}
    for sample in SAMPLES:
        family = [node for node in node_ids if node.startswith(sample.tests) and node not in chosen]
        kept = spread(len(family), sample.keep)
        chosen |= {node for place, node in enumerate(family) if place not in kept}
    return chosen


def chosen_by(shard: Shard, node_ids: Sequence[str]) -> list[str]:
    """The tests of a shard, in the order given."""
    family = [node for node in node_ids if node.startswith(shard.tests) and shard.holding in node]
    first, step = shard.part
    return family[first::step]


def draw(commit: str, changed: Iterable[str]) -> int:
    """The number of one shard: among those whose code changed (all if none did), by the commit's hash."""
    files = tuple(name.removeprefix("src/phalanx/") for name in changed)
    touched = [
        number
        for number, shard in enumerate(SHARDS, 1)
        if any(name.startswith(source) for name in files for source in shard.sources)
    ]
    numbers = touched or list(range(1, len(SHARDS) + 1))
    return numbers[int(hashlib.sha256(commit.encode()).hexdigest(), 16) % len(numbers)]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _paths(prefix: str) -> list[str]:
    """The file or folder, or all files whose names begin so."""
    return (
        [prefix] if (ROOT / prefix).exists() else [str(path.relative_to(ROOT)) for path in ROOT.glob(f"{prefix}*.py")]
    )


def run(numbers: Sequence[int], more: Sequence[str]) -> int:
    """Run shards one after the other, then print a line for each. Returns 0 if every one was green."""
    results = []
    for number in numbers:
        shard = SHARDS[number - 1]
        print(f"shard {number}: {shard.title}", flush=True)
        for need in shard.needs:
            subprocess.run(["make", "-s", need], cwd=ROOT, check=False)
        files = sorted({path for test in shard.tests for path in _paths(test.partition("::")[0])})
        words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--shard", str(number), *files, *more]
        begin_s = time.monotonic()
        code = subprocess.run(words, cwd=ROOT, env={**os.environ, "PHALANX_EFFORT": "full"}, check=False).returncode
        results.append((number, shard.title, code, time.monotonic() - begin_s))
    for number, title, code, seconds in results:
        print(f"shard {number:2}  {'green' if code == 0 else f'RED ({code})':8} {seconds / 60:5.1f} min  {title}")
    return int(any(code for _, _, code, _ in results))


def main(words: Sequence[str]) -> int:
    """The table, the draw, or a run."""
    if list(words) == ["draw"]:
        commit = _git("rev-parse", "HEAD").strip()
        depth = min(COMMITS, int(_git("rev-list", "--count", "HEAD")) - 1)
        print(draw(commit, _git("diff", "--name-only", f"HEAD~{depth}", "HEAD", "--", "src/phalanx").split()))
        return 0
    if words and words[0] == "run":
        every = range(1, len(SHARDS) + 1)
        if words[1] != "all" and (not words[1].isdecimal() or int(words[1]) not in every):
            print(f"error: there is no shard {words[1]}; `make shards` lists 1 to {len(SHARDS)}", file=sys.stderr)
            return 64
        return run(list(every) if words[1] == "all" else [int(words[1])], words[2:])
    for number, shard in enumerate(SHARDS, 1):
        first, step = shard.part
        part = f" ({first + 1} of {step})" if step > 1 else ""
        print(f"{number:3}  {shard.title}{part}" + (f"  [{', '.join(shard.needs)}]" if shard.needs else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
