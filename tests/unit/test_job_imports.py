"""Files of SkyPilot, dstack and Slurm become job files: what is written is a valid job file, and no key of the source is lost without a word."""

# mypy: disable-error-code="arg-type, var-annotated"

import random

import pytest

from phalanx.cli.jobs.request.job_file import parse_job_file, read_job_file
from phalanx.cli.root import main
from phalanx.core.errors import BadFile, PhalanxError
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.user_files.job_imports import job_draft
from phalanx.user_files.job_imports.foreign_file import ForeignFormat, import_foreign_file
from phalanx.user_files.yaml_document import FileKind, parse_yaml
from phalanx.user_files.yaml_text import yaml_text

ANY = FileKind(name="file", example="", bytes_max=1 << 20, depth_max=20, events_max=10_000, aliases=True)
SKY = """
name: tune-a
workdir: ~/projects/tune
num_nodes: 3
event_callback: echo called
resources:
  infra: gcp/us-west1
  cloud: gcp
  region: us-west1
  zone: us-west1-b
  instance_type: a3-highgpu-8g
  accelerators: {H100: 8, A100-80GB: 4}
  accelerator_args: {runtime_version: some-runtime}
  cpus: 48+
  memory: 4x
  use_spot: true
  disk_size: 700
  disk_tier: best
  network_tier: premium
  local_disk: nvme:1000
  max_hourly_cost: 12.5
  ports: [6007, 7000-7010]
  labels: {team: vision}
  image_id: docker:docker.io/library/python:3.11
  priority: 17
  priority_class: urgent
  autostop: {idle_minutes: 11, wait_for: none}
  job_recovery: {strategy: FAILOVER, max_restarts_on_errors: 5, recover_on_exit_codes: [33]}
  volumes: [{name: v1, path: /mnt/v1}]
  any_of: [{accelerators: "L40S:6", infra: aws}, {region: eu-1}]
  ordered: [{accelerators: {B200: 7}}]
envs: {LEARNING_RATE: 1e-5, UNSET: null, WORLD_SIZE: "9"}
secrets: {WANDB_KEY: value-of-a-secret, HF_TOKEN: null}
managed_secrets: [shared]
file_mounts:
  /mnt/corpus: gs://corpus-bucket/v2
  /mnt/out: {name: my-results, store: s3, mode: MOUNT_CACHED}
  /mnt/tok: {source: s3://tokens/x, mode: COPY}
  /mnt/local: ./relative
volumes: {/mnt/vol: claim-1}
pool: {workers: 2}
config: {docker: {run_options: [--cap-add]}}
inputs: {a: 1}
outputs: {b: 2}
setup: pip install -e .
run: |
  python train.py --rank $SKYPILOT_NODE_RANK --token $SKYPILOT_USER
some_future_key: {with: [a, b]}
"""
SKY_SERVICE = """
name: Chat
service:
  readiness_probe: {path: /health, initial_delay_seconds: 90, timeout_seconds: 4, headers: {A: b}}
  replica_policy: {min_replicas: 2, max_replicas: 5, target_qps_per_replica: 3, upscale_delay_seconds: 30}
  ports: 9000
  load_balancing_policy: least_load
  tls: {keyfile: k, certfile: c}
resources: {accelerators: "L4:2", ports: 9000, use_spot: false}
run: exec server --port 9000
"""
DSTACK = """
type: task
name: tune-b
image: docker.io/library/python:3.12
user: ubuntu
privileged: true
entrypoint: /bin/x
working_dir: /src
home_dir: /root
registry_auth: {username: u, password: p}
nvcc: false
single_branch: true
shell: zsh
docker: false
repos: [.]
files: [a.txt]
commands: [make, 'python train.py $DSTACK_NODE_RANK $DSTACK_UNHEARD_OF']
nodes: 4
env: [LEARNING_RATE=1e-5, HF_TOKEN, 'WANDB_KEY=${{ secrets.wb }}']
resources: {gpu: {vendor: nvidia, name: [H100, H200], memory: 80GB.., count: 4..8, total_memory: 320GB, compute_capability: 9.0}, cpu: 24.., memory: 96GB..128GB, shm_size: 24GB, disk: 333GB}
ports: [6007, "7070:8080"]
volumes: [vol:/mnt/vol, /nfs/corpus:/mnt/corpus, {name: v2, path: /mnt/v2}, {instance_path: /nfs/tok, path: /mnt/tok}]
max_duration: 7h
stop_duration: 90
retry: {on_events: [error, interruption], duration: 5h}
spot_policy: spot
backends: [aws]
regions: [us-1]
availability_zones: [us-1a]
instance_types: [p5]
reservation: deadline
max_price: 3.5
creation_policy: reuse
idle_duration: 6m
utilization_policy: {min_gpu_utilization: 10, time_window: 1h}
priority: 33
fleets: [f]
schedule: {cron: "0 0 * * *"}
startup_order: any
stop_criteria: all-done
tags: {a: b}
python: "3.12"
"""
DSTACK_SERVICE = """
type: service
name: chat_b
python: "3.11"
commands: [python serve.py]
port: 80:9000
gateway: true
strip_prefix: true
model: {name: llama, type: chat, format: openai}
https: true
auth: false
replicas: 1..3
scaling: {metric: rps, target: 9}
rate_limits: [{rps: 5}]
probes: [{type: http, url: /live, interval: 9s}, {type: http, url: /more}]
resources: {gpu: 24GB..:2}
retry: true
"""
DSTACK_DEV = """
type: dev-environment
ide: vscode
version: "1.2"
init: [make]
inactivity_duration: 3h
resources: {gpu: A100}
"""
SBATCH = """#!/bin/bash
#SBATCH -J tune-c -N 2 --gpus-per-node=h100:4 --ntasks-per-node=4
#SBATCH -t 1-02:00:00 --array=0-7%2 --qos=high --constraint=skylake
#SBATCH --partition=big --account=nlp --mem-bind=local --comment=hello --begin=now+1hour --exclusive
srun python train.py
"""
SOURCES = {
    "sky": SKY,
    "sky-service": SKY_SERVICE,
    "dstack": DSTACK,
    "dstack-service": DSTACK_SERVICE,
    "dstack-dev": DSTACK_DEV,
}


def imported(text):
    [job] = import_foreign_file(text, path="t.yaml", folder="/work")
    return job


def parsed(job):
    """The job as the parser of job files reads what is written."""
    return spec_from_mapping(
        parse_job_file(yaml_text(job.mapping), path="job.yaml").mapping, workdir="/work", now_s=0.0
    )


def leaves(value, path=""):
    match value.content:
        case dict() as table if table:
            for name, one in table.items():
                yield from leaves(one, f"{path}.{name}".removeprefix("."))
        case list() as listed if listed:
            for index, one in enumerate(listed):
                yield from leaves(one, f"{path}[{index}]")
        case text:
            yield path, text


def named(notes):
    """The keys that notes name, each with all below it."""
    return [
        note.removeprefix("t.yaml:").partition(": ")[2].partition(" is not taken over: ")[0].partition(": ")[0]
        for note in notes
    ]


def texts(value):
    """All texts of a job file, in one."""
    match value:
        case dict():
            return "\n".join(f"{key}: {texts(one)}" for key, one in value.items())
        case list():
            return "\n".join(texts(one) for one in value)
        case _:
            return str(value).lower() if isinstance(value, bool) else str(value)


def holds(job, path, value):
    """Whether the job file has this text of the source in some form: `80:9000` by its end, `A=1` as an entry, `A100` in lower case."""
    text, all_texts = str(value).strip().rstrip(":").lower(), texts(job.mapping).lower()
    forms = (
        text,
        text.rpartition(":")[2] or text,
        text.replace("=", ": "),
        text.replace(" ", "-"),
        MAPPED.get(path, text),
    )
    forms += (path.rpartition(".")[2],) if text == "null" and "accelerators" in path else ()  # {A100, H100}
    return any(form.lower() in all_texts for form in forms)


def is_named(path, names):
    return any(path == one or path.startswith((f"{one}.", f"{one}[")) for one in names)


# Values whose form in the job file is another one.
MAPPED = {
    "resources.accelerators.H100": "h100:8",
    "resources.accelerators.A100-80GB": "a100-80gb:4",
    "resources.any_of[0].accelerators": "l40s:6",
    "resources.ordered[0].accelerators.B200": "b200:7",
    "num_nodes": "3x",
    "resources.memory": "192G",
    "resources.use_spot": "preemptible",
    "setup": "pip install",
    "run": "python train.py",
    "commands[1]": "python train.py",
    "nodes": "4x",
    "resources.gpu.name[0]": "h100-80gb",
    "resources.gpu.name[1]": "h200-80gb",
    "resources.gpu.memory": "80gb",
    "resources.cpu": "24",
    "resources.image_id": "python:3.11",
    "spot_policy": "preemptible: true",
    "port": "9000",
    "probes[0].type": "ready: /live",
    "service.readiness_probe.initial_delay_seconds": "90s",
    "resources.ports": "9000",
}


@pytest.mark.parametrize("source", SOURCES)
def test_each_key_is_in_the_job_file_or_named(source):
    text = SOURCES[source]
    job = imported(text)
    names = named(job.notes)
    lost = [
        path
        for path, value in leaves(parse_yaml(text, ANY, path="t.yaml"))
        if not is_named(path, names) and not holds(job, path, value) and path not in ("type", "name")
    ]
    assert lost == []
    assert "value-of-a-secret" not in texts(job.mapping)
    assert all("value-of-a-secret" not in note for note in job.notes)
    parsed(job)


def test_a_sky_task_has_its_shape_variables_and_data():
    job = imported(SKY)
    spec = parsed(job)
    assert str(spec.role.gpus) == "3xh100:8|3xa100-80gb:4|3xl40s:6|3xb200:7"
    assert (spec.role.tasks_per_node, spec.role.cpus, spec.role.memory_bytes >> 30, spec.retry) == (1, 48, 192, 5)
    assert spec.role.script.startswith('export SKYPILOT_NODE_RANK="$PHALANX_NODE_RANK"\npython train.py')
    assert dict(spec.env) == {"LEARNING_RATE": "1e-5"}
    assert spec.secrets == ("WANDB_KEY", "HF_TOKEN")
    assert dict(spec.data) == {"mnt_corpus": "gs://corpus-bucket/v2", "mnt_tok": "s3://tokens/x"}
    assert "t.yaml:46: run: nothing sets SKYPILOT_USER here" in job.notes


def test_services_have_their_range_port_and_probe():
    first, second = parsed(imported(SKY_SERVICE)), parsed(imported(DSTACK_SERVICE))
    assert (first.name, first.service.range_text, first.service.port, first.service.ready) == (
        "chat",
        "2..5",
        9000,
        "/health",
    )
    assert (second.name, second.service.range_text, second.service.port, second.service.ready) == (
        "chat-b",
        "1..3",
        9000,
        "/live",
    )
    assert str(second.role.gpus) == "1xany-24gb:2"


@pytest.mark.parametrize(
    ("gpu", "request_"),
    [
        ("H100:8", "1xh100:8"),
        ("24GB", "any-24gb:1"),
        ("2", "1x2"),
        ("A100:80GB:2", "1xa100-80gb:2"),
        ("H100,A100:40GB..:4", "1xh100-40gb,a100-40gb:4"),
        ("nvidia:H100:2..4", "1xh100:2"),
    ],
)
def test_gpus_of_dstack(gpu, request_):
    assert imported(f"type: task\ncommands: [x]\nresources: {{gpu: '{gpu}'}}").mapping["gpus"] == request_


@pytest.mark.parametrize(
    ("gpu", "request_"),
    [
        ("H100", "h100:1"),
        ("{V100:1, A100:1}", "v100,a100:1"),
        ("[T4:2, 'A10G:1']", "1xt4:2|a10g:1"),
        ("{H100: 0.5}", "1xh100:0.5"),
        ("24GB+:2", "1xany-24gb:2"),
    ],
)
def test_accelerators_of_skypilot(gpu, request_):
    assert imported(f"run: x\nresources: {{accelerators: {gpu}}}").mapping["gpus"] == request_


def test_a_pipeline_is_one_job_for_each_task():
    first, second = import_foreign_file(
        "name: p\n---\nname: a\nrun: x\n---\nname: b\nnum_nodes: 2\nrun: |\n  y\n   --- z\n",
        path="t.yaml",
        folder="/work",
    )
    assert (first.mapping["name"], second.mapping["name"], second.mapping["nodes"]) == ("a", "b", 2)
    assert named(first.notes) == ["name"]


def test_tasks_of_a_pipeline_need_a_command_only():
    text = "name: p\nexecution: serial\n---\nname: a\nrun: x\n---\nrun: y\nenvs: {A: b}\nname: b\n---\nrun: z\n"
    jobs = import_foreign_file(text, path="t.yaml", folder="/work")
    assert [job.mapping["run"] for job in jobs] == ["x", "y", "z"]
    with pytest.raises(BadFile, match="a job file already"):
        import_foreign_file("run: x\n---\nrun: y\ngpus: 1\n", path="t.yaml", folder="/work")


def test_a_batch_script_is_never_read_as_a_task():
    with pytest.raises(BadFile, match="a batch script"):
        import_foreign_file("#!/bin/bash\n#SBATCH -N 1\n", path="t", folder="/work", form=ForeignFormat.SKY)


def test_a_batch_script_is_the_job_that_its_submit_makes():
    job = imported(SBATCH)
    spec = parsed(job)
    assert spec.is_batch_script
    assert (spec.name, str(spec.role.gpus), spec.time_limit_s, spec.array, spec.array_max) == (
        "tune-c",
        "2xh100:4",
        93600.0,
        "0-7",
        2,
    )
    for option in ("--qos", "--constraint", "--partition", "--account", "--mem-bind", "--exclusive", "--export"):
        assert any(option in note for note in job.notes), option


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty file"),
        ("- a", "keys and values"),
        ("foo: 1", "no file of a known tool"),
        ("type: fleet\nnodes: 2", "runs nothing"),
        ("run: echo\ngpus: 1", "a job file already"),
        ("#!/bin/bash\necho", "without #SBATCH"),
        ("num_nodes: 2", "no run"),
        ("run: [a]\nnum_nodes: 2", "no run"),
        ("type: task\nimage: x", "no commands"),
        ("run: !!python/object:os.system x\nnum_nodes: 1", "the tag"),
        ("run: x\nnum_nodes: 1\nrun: y", "defined twice"),
        ("#!/bin/bash\n#SBATCH --nodes=many\n", "--nodes"),
        ("a: " + "[" * 50, "nested"),
    ],
)
def test_a_file_that_is_no_job_is_one_error_with_its_place(text, word):
    with pytest.raises(BadFile) as refused:
        import_foreign_file(text, path="t.yaml", folder="/work")
    assert word in str(refused.value)
    assert str(refused.value).startswith("t.yaml:")
    assert "\n" not in str(refused.value)


def test_what_is_written_is_a_job_file_whatever_the_values():
    """Values of wrong kinds and forms: each is left out and named, or taken, or the whole file is refused in one line."""
    rng = random.Random(18)
    values = [
        "-1",
        "0",
        "x",
        "'a b'",
        "null",
        "[]",
        "{}",
        "[1, a]",
        "{a: 1}",
        "1e9",
        "99999999",
        "true",
        "'$(x)'",
        '"a\\nb"',
        "..",
        "4..2",
        "H100:",
        "::",
        "é",
    ]
    keys = sorted(
        {
            path.partition("[")[0]
            for text in SOURCES.values()
            for path, _ in leaves(parse_yaml(text, ANY, path="t.yaml"))
        }
    )
    made = 0
    for _ in range(250):
        tree: dict = (
            {"run": "x"}
            if rng.random() < 0.5
            else {"type": rng.choice(("task", "service", "dev-environment")), "commands": "[x]"}
        )
        for key in rng.sample(keys, 6):
            node: dict = tree
            *parents, last = key.split(".")
            for parent in parents:
                node = node.setdefault(parent, {}) if isinstance(node.get(parent, {}), dict) else {}
            node.setdefault(last, rng.choice(values))
        try:
            job = imported(flow(tree))
        except PhalanxError:
            continue
        parsed(job)
        made += 1
        names = named(job.notes)
        for path, value in leaves(parse_yaml(flow(tree), ANY, path="t.yaml")):
            if path in ("name", "run", "type") or path.startswith("commands"):
                continue
            assert is_named(path, names) or holds(job, path, value), (flow(tree), path, job)
    assert made > 100


@pytest.mark.parametrize(
    "lines",
    [
        "type: task\ncommands: [x]\nmax_duration: 3x",
        "type: task\ncommands: [x]\nports: ['9:99999999']",
        f"type: task\ncommands: [x]\nnodes: {'9' * 5000}",
        f"type: task\ncommands: [x]\npriority: {'9' * 5000}",
        f"type: task\ncommands: [x]\nresources: {{cpu: {'9' * 5000}}}",
        f"run: x\nnum_nodes: {'9' * 5000}",
        f"run: x\nresources: {{job_recovery: {{max_restarts_on_errors: {'9' * 5000}}}}}",
    ],
)
def test_a_value_that_is_refused_has_one_note(lines):
    [note] = imported(lines).notes
    assert "is not taken over: " in note


def test_a_file_of_thousands_of_variables_is_checked_a_few_times(monkeypatch):
    checks = []

    def counted(*args, **more):
        checks.append(1)
        return spec_from_mapping(*args, **more)

    monkeypatch.setattr(job_draft, "spec_from_mapping", counted)
    job = imported(
        "run: x\nnum_nodes: 2\nenvs:\n" + "".join(f"  V{number}: a\n" for number in range(1000)) + "  RANK: a\n"
    )
    assert len(parsed(job).env) == 1000
    assert named(job.notes) == ["envs.RANK"]
    assert len(checks) < 40


def flow(value):
    return (
        value
        if isinstance(value, str)
        else "{" + ", ".join(f"{name}: {flow(one)}" for name, one in value.items()) + "}"
    )


def test_the_command_writes_files_and_says_how_to_submit_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text("name: a\nrun: x\n---\nname: b\nrun: y\nresources: {disk_size: 5}\n")
    assert main(["import", "p.yaml"]) == 64
    assert "-o job.yaml makes job-1.yaml, job-2.yaml" in capsys.readouterr().err
    assert main(["import", "p.yaml", "--output", "job.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "p.yaml:6: resources.disk_size is not taken over" in err
    assert (
        "job=$(phalanx submit --quiet job-1.yaml) && job=$(phalanx submit --quiet job-2.yaml --depends-on $job)" in err
    )
    assert read_job_file("job-2.yaml").mapping == {"name": "b", "run": "y", "tasks_per_node": 1}
    (tmp_path / "one.yaml").write_text("num_nodes: 2\nrun: x\n")
    capsys.readouterr()
    assert main(["import", "one.yaml", "-o", "job-1.yaml"]) == main(["import", "one.yaml", "-o", "one.yaml"]) == 64
    assert "job-1.yaml exists already" in capsys.readouterr().err
    assert read_job_file("job-1.yaml").mapping == {"name": "a", "run": "x", "tasks_per_node": 1}
    assert main(["import", "one.yaml", "-o", "none/x.yaml"]) == 78
    assert main(["import", "one.yaml", "--from", "dstack"]) == 78
    capsys.readouterr()
    assert main(["import", "one.yaml"]) == 0
    printed = capsys.readouterr().out
    assert printed == "run: x\nnodes: 2\ntasks_per_node: 1\n"
    assert main(["import", "one.yaml", "-o", "-"]) == 0
    assert capsys.readouterr().out == printed
    assert not (tmp_path / "-").exists()
