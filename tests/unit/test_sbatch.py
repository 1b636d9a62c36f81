"""An unchanged #SBATCH script becomes a job with Slurm's meaning of each option; what is not done is named by line."""

import pytest

from phalanx.core.errors import BadFile
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.sbatch_scripts.sbatch import is_sbatch_script, parse_script_options
from phalanx.core.work.sbatch_scripts.sbatch_job import convert_script
from phalanx.core.work.sbatch_scripts.script_times import parse_slurm_seconds
from phalanx.core.work.spec import LaunchMode


def script(*lines, body="srun true"):
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "", body, ""])


def read(*lines, **more):
    return convert_script(script(*lines), **{"name": "job.sh", "folder": "/home/me/run", **more})


def spec(*lines, **more):
    return spec_from_mapping(read(*lines, **more).mapping, workdir="/home/me/run", now_s=1000.0)


def options(text):
    return {given.name: given.value for given in parse_script_options(text)}


# ---- which lines count --------------------------------------------------------------------------------------------------


def test_directives_end_at_the_first_command_and_the_later_of_two_counts():
    text = "#!/bin/sh\n# a comment\n#SBATCH -N 2\n\n  # another\n#SBATCH --nodes=4 # four\necho hi\n#SBATCH -n 99\n"
    assert options(text) == {"nodes": "4"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("-N2", {"nodes": "2"}),
        ("-N 2 -n8", {"nodes": "2", "ntasks": "8"}),
        ("--job-name 'my job'", {"job-name": "my job"}),
        ('-J "a#b"', {"job-name": "a#b"}),
        ("-J a#b", {"job-name": "a#b"}),
        ("--gres gpu:2", {"gres": "gpu:2"}),
        ("--ntasks-per-n=4", {"ntasks-per-node": "4"}),
        ("-H -N1", {"hold": "", "nodes": "1"}),
        ("--exclusive", {"exclusive": ""}),
        ("--tasks-per-node=8", {"ntasks-per-node": "8"}),
        ("--wait-all-nodes=1 --err=e.txt", {"wait-all-nodes": "1", "error": "e.txt"}),
        ("-o out\\ put.txt", {"output": "out put.txt"}),
    ],
)
def test_a_line_is_split_as_sbatch_splits_it(line, found):
    assert options(script(line)) == found


@pytest.mark.parametrize("text", ["##SBATCH -N 2", "# SBATCH -N 2", "#SBATCHX -N 2", " #SBATCH -N 2", "#PBS -N 2"])
def test_what_only_looks_like_a_directive_is_a_comment(text):
    assert not is_sbatch_script(f"#!/bin/sh\n{text}\ntrue\n")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--gpu-per-node=4", r"line 2: sbatch has no option --gpu-per-node"),
        ("-Z 3", "line 2: sbatch has no option -Z"),
        ("--nodes", "--nodes has no value"),
        ("hetjob -N 2", "stands alone"),
        ("-J 'open", "missing closing '"),
        ("--container=x", "--container is not supported"),
        ("-M other", "--clusters is not supported"),
        ("train.py", "'train.py' is not an option"),
    ],
)
def test_what_sbatch_would_refuse_is_refused_by_line(line, why):
    with pytest.raises(BadFile, match=why):
        parse_script_options(script(line))


def test_directives_after_the_first_command_make_a_batch_script_without_options():
    text = "#!/bin/bash -l\necho hi\n#SBATCH --mem=32g\n"
    assert is_sbatch_script(text)
    assert options(text) == {}


def test_options_of_the_command_line_replace_those_of_the_script():
    found = read("-N 4", "-J inside", given=["-N", "2", "--job-name=outside"])
    assert (found.mapping["nodes"], found.mapping["name"]) == (2, "outside")


def test_cpus_are_counted_for_each_gpu():
    found = read("--gpus-per-node=4", "-N2", "--cpus-per-gpu=8", "--mem-per-gpu=10G").mapping
    assert (found["cpus"], found["memory"], found["slurm"]["cpus_per_gpu"]) == (32, "40960M", "8")
    with pytest.raises(BadFile, match="exclude each other"):
        read("--gpus-per-node=4", "--cpus-per-gpu=8", "-c 2")


def test_only_an_exclusive_script_wants_whole_nodes():
    assert [read(*lines).exclusive for lines in ([], ["--exclusive"], ["--exclusive=user"])] == [(), (0,), ()]


def test_a_script_begins_with_its_interpreter():
    with pytest.raises(BadFile, match="first line"):
        parse_script_options("#SBATCH -N 1\ntrue\n")


# ---- shape --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "nodes", "gpus", "ntasks", "per_node"),
    [
        # lines                                               nodes  GPUs  tasks  on one node
        (["-N 2", "--ntasks-per-node=8", "--gpus-per-node=8"], 2, 16, 16, 8),
        (["-N 2", "--gres=gpu:4"], 2, 8, 2, 1),
        (["-N 2", "--gres=gpu:a100:4"], 2, 8, 2, 1),
        (["-n 8", "--ntasks-per-node=4", "--gres=gpu:4"], 2, 8, 8, 4),
        (["-N 2", "-G 8"], 2, 8, 2, 1),
        (["-n 4", "--gpus-per-task=1"], None, 4, 4, 4),
        (["-N 2", "--ntasks-per-node=2", "--gpus-per-task=2"], 2, 8, 4, 2),
        (["-G 8", "--gpus-per-node=4"], 2, 8, 2, 1),
        (["-N 3", "-n 6"], 3, 0, 6, 2),
        ([], 1, 0, 1, 1),
        (["--gpus=2"], None, 2, 1, 1),
    ],
)
def test_nodes_tasks_and_devices(lines, nodes, gpus, ntasks, per_node):
    found = read(*lines)
    asked = spec(*lines)
    assert asked.role.gpus.total == gpus
    assert found.mapping.get("nodes") == nodes
    assert (found.mapping["slurm"]["ntasks"], found.mapping["slurm"]["tasks_per_node"]) == (str(ntasks), str(per_node))
    assert (asked.role.launch, asked.role.tasks_per_node) == (LaunchMode.FIXED, 1), "the script itself runs once"


@pytest.mark.parametrize(
    ("lines", "gpus", "kind"),
    [
        (["--gres=mps:25"], "0.25", "mps"),
        (["-N 2", "--gres=mps:a100:50"], "2xa100:0.5", "mps"),
        (["--gres=shard:1"], "0.25", "time"),
        (["--gres=gres/shard:4"], "1x1", None),
        (["--gres=mps:100"], "1x1", None),
        (["--gres=gpu:1g.10gb:2"], "1g.10gb:2", "mig"),
        (["--gres=gpu:h100_1g.10gb:1"], "h100.1g.10gb", "mig"),
        (["-N 4", "--gres=gpu:nvidia_a100-sxm4-40gb_1g.5gb+me:2"], "4xa100-40gb.1g.5gb+me:2", "mig"),
        (["-N 2", "--gpus-per-node=1g.10gb:1"], "2x1g.10gb", "mig"),
        (["--gpus=3g.40gb:1"], "3g.40gb", "mig"),
    ],
)
def test_parts_of_gpus(lines, gpus, kind):
    """Slurm's mps counts percents of a GPU, its shard counts a site's own parts, which nothing fences."""
    asked = spec(*lines).role.gpus
    assert str(asked) == gpus
    assert (asked.share.kind if asked.share else None) == kind


@pytest.mark.parametrize(
    "lines",
    [
        ["--gres=mps:150"],
        ["--gres=shard:5"],
        ["--gres=mps:20,shard:1"],
        ["--gres=gpu:1,mps:20"],
        ["--gres=gpu:1g.10gb:1,mps:20"],
    ],
)
def test_parts_of_gpus_that_cannot_be_had_are_refused(lines):
    with pytest.raises(BadFile, match="line 2: --gres"):
        read(*lines)


def test_a_site_says_how_many_shards_a_gpu_has():
    found = convert_script(script("--gres=shard:2"), name="a.sh", folder="/w", shards_per_gpu=10)
    assert found.mapping["gpus"] == "1x2/10"


def test_fewer_tasks_than_nodes_take_fewer_nodes_and_it_says_so():
    found = read("-N 4", "-n 2")
    assert (found.mapping["nodes"], found.notes) == (
        2,
        ("--nodes=4 with --ntasks=2: 2 nodes are used, as in Slurm",),
    )


def test_cpus_and_memory_are_of_the_node():
    asked = spec("-N 2", "--ntasks-per-node=4", "-c 3", "--mem-per-cpu=2G")
    assert (asked.role.cpus, asked.role.memory_bytes) == (12, 24 << 30)
    assert spec("--mem=4000").role.memory_bytes == 4000 << 20, "a bare number is MiB"
    assert spec("--gres=gpu:2").role.cpus == 0, "with devices and no -c, the devices' share"


def test_gpus_that_do_not_fall_into_equal_parts_are_refused_by_line():
    with pytest.raises(BadFile, match=r"line 3: --gpus=5: 5 GPUs do not divide"):
        read("-N 2", "--gpus=5")


# ---- time, order, files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-12:30", 131400),
        ("2-00:00:10", 172810),
        ("x", None),
    ],
)
def test_times_as_slurm_writes_them(text, seconds):
    assert parse_slurm_seconds(text) == seconds


def test_time_array_dependency_and_the_rest_reach_the_job():
    asked = spec(
        "-t 1:00:00",
        "--array=1-9:2%3",
        "-d afterok:12:13,afterany:14",
        "-J my",
        "-H",
        "--nice=5",
        "-w n[0-1]",
        "-x n7",
        "-D sub",
        "--begin=now+2hours",
        "--comment=hello",
        "--reservation=r1",
        args=("a", "b c"),
    )
    assert (asked.time_limit_s, asked.array, asked.array_max, asked.name, asked.hold) == (
        3600.0,
        "1-9:2",
        3,
        "my",
        True,
    )
    assert [str(one) for one in asked.dependencies] == ["afterok:12", "afterok:13", "afterany:14"]
    assert (asked.priority, asked.nodelist, asked.exclude, asked.workdir) == (
        -5,
        ("n0", "n1"),
        ("n7",),
        "/home/me/run/sub",
    )
    assert (asked.begin_s, asked.reservation, dict(asked.labels)) == (8200.0, "r1", {"slurm.comment": "hello"})
    assert dict(asked.slurm)["args"] == '["a", "b c"]'


def test_output_is_slurms_own_unless_said():
    assert read().mapping["slurm"]["output"] == "slurm-%j.out"
    assert read("-a 0-3").mapping["slurm"]["output"] == "slurm-%A_%a.out"
    named = read("-o %x-%j.log", "-e err.%j", "--open-mode=append").mapping["slurm"]
    assert (named["output"], named["error"], named["open_mode"]) == ("%x-%j.log", "err.%j", "append")


@pytest.mark.parametrize(
    ("text", "found"),
    [("USR1", "steps:10:60"), ("B:SIGTERM@120", "batch:15:120"), ("R:12@5", "steps:12:5"), ("BR:USR2", "batch:12:60")],
)
def test_signals(text, found):
    assert read(f"--signal={text}", "-t 10").mapping["slurm"]["signal"] == found


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--signal=NOPE", "is not .B:.SIGNAL"),
        ("-t tomorrow", "is not a time"),
        ("--mem=lots", "not an amount of memory"),
        ("-N two", "neither a number"),
        ("-a 5-1", "ends before it begins"),
        ("-d after:1", "is not a dependency"),
        ("-d afterok:1?afterok:2", "one of several"),
        ("--begin=teatime", "words for times"),
        ("--gpus=many", "is not .TYPE:.NUMBER"),
        ("-n -3", "is not a number"),
        ("--nice=much", "not a whole number"),
        ("--licenses=a|b", "is not NAME"),
        ("--tmp=much", "not an amount of disk space"),
        ("--mail-type=SOMETIMES", "SOMETIMES is not a type of mail"),
    ],
)
def test_values_that_cannot_be_read_are_refused_by_line(line, why):
    with pytest.raises(BadFile, match=f"line 2: .*{why}"):
        read(line)


@pytest.mark.parametrize(
    ("lines", "on"),
    [
        (("--mail-type=ALL",), "start, end, failure, requeue"),
        (("--mail-type=begin", "--mail-type=end,FAIL"), "start, end, failure"),
        (("--mail-type=TIME_LIMIT",), "failure"),
        (("--mail-type=NONE",), None),
    ],
)
def test_mail_is_the_key_notify(lines, on):
    found = spec(*lines, "--mail-user=ada@example.org,bob@example.org").notify
    assert str(found) == (f"ada@example.org, bob@example.org on {on}" if on else "None")


def test_types_of_mail_without_a_counterpart_are_named_by_line():
    said = read("--mail-user=ada@example.org", "--mail-type=END,TIME_LIMIT_80", "--mail-type=ARRAY_TASKS,STAGE_OUT")
    assert [note.partition(":")[0] for note in said.notes] == ["line 3", "line 4", "line 4"]
    assert said.mapping["notify"]["on"] == ["end"]


def test_licences_and_disk_space_are_resources():
    role = spec("--licenses=matlab@flex:2,Cad", "--tmp=100G").role
    assert role.extras == (("cad", 1), ("matlab", 2), ("scratch", 100 << 30))
    assert spec("-L matlab", "--tmp=4000").role.extras == (("matlab", 1), ("scratch", 4000 << 20))
    assert spec("--tmp=0").role.extras == ()
    (note,) = read("--tmp=100G").notes
    assert note == "--tmp=100G is that much of the resource scratch on each node, which nodes offer with --offers"


# ---- what is not done ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("--qos=high", "line 2: --qos=high is not honoured"),
        ("-C haswell", "line 2: --constraint=haswell is not honoured"),
        ("-C a100", "line 2: --constraint=a100 is not honoured"),  # no GPU is asked for
        ("--mail-type=END", "line 2: --mail-type=END is not honoured: no mail is sent without an address"),
        ("--mail-user=a@b.org", "line 2: --mail-user=a@b.org is not honoured: no mail is sent without --mail-type"),
        ("--mail-type=END --mail-user=ada", "line 2: --mail-user=ada is not honoured: it is not a mail address"),
        ("--no-requeue", "requeued"),
        ("--mem=0", "none is requested"),
        ("--gres=fpga:2", "only GPUs"),
        ("--gres=shard:2", "2 of 4 shards of a GPU; set PHALANX_SHARDS_PER_GPU"),
        ("-N 2-4", "2 nodes are requested"),
        ("--signal=USR1", "has no effect"),
    ],
)
def test_what_is_not_honoured_is_named(line, note):
    (said,) = read(line).notes
    assert note in said


@pytest.mark.parametrize(
    ("lines", "gpus"),
    [
        (("--gres=gpu:8", '-C "h100|a100"'), "h100,a100:8"),
        (("--gpus-per-node=4", "-N 2", "-C [h100_80gb|a100-40gb]"), "h100-80gb,a100-40gb:8"),
        (("--gpus=a100:8", "-C h100"), "a100:8"),  # the type of the request is the narrower one
        (("--gres=gpu:8", '-C "h100|haswell"'), 8),
        (("--gres=gpu:8", '-C "h100&ib"'), 8),
    ],
)
def test_a_constraint_of_gpu_models_chooses_among_them(lines, gpus):
    read_script = read(*lines)
    assert read_script.mapping["gpus"] == gpus
    assert bool(read_script.notes) == (gpus in (8, "a100:8"))


def test_what_is_honoured_says_nothing():
    lines = (
        "-J a",
        "-N 2",
        "--ntasks-per-node=2",
        "--gres=gpu:2",
        "-c 2",
        "-t 5",
        "-o x",
        "--mem=1G",
        "--requeue",
        "-i /dev/null",
    )
    assert read(*lines).notes == ()
