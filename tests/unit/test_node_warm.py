"""Which commands start warm, and which part of an environment their zygote must share."""

import pytest

from phalanx.node.logic.warm_start import WarmCommand, parse_warm_command, startup_environment


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("python", "train.py"), ("python", False, "train.py", None, ())),
        (("python3", "-u", "src/train.py", "--lr", "a b"), ("python3", True, "src/train.py", None, ("--lr", "a b"))),
        (
            ("/venv/bin/python3.11", "-m", "pkg.train", "-x"),
            ("/venv/bin/python3.11", False, None, "pkg.train", ("-x",)),
        ),
        (("python", "-u", "-m", "train"), ("python", True, None, "train", ())),
        (
            "python train.py --steps 10 --name a=b",
            ("python", False, "train.py", None, ("--steps", "10", "--name", "a=b")),
        ),
        ("  .venv/bin/python -m train  ", (".venv/bin/python", False, None, "train", ())),
    ],
)
def test_a_plain_python_command_starts_warm(command, expected):
    interpreter, unbuffered, script, module, arguments = expected
    assert parse_warm_command(command) == WarmCommand(
        interpreter=interpreter, unbuffered=unbuffered, script=script, module=module, arguments=arguments
    )


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("python",),
        ("python", "-u"),
        ("python", "-c", "print()"),
        ("python", "-O", "train.py"),
        ("python", "-um", "train"),
        ("python", "-m"),
        ("python", "-m", "not-a-module"),
        ("python", "train"),
        ("python", "-"),
        ("python2", "train.py"),
        ("pypy3", "train.py"),
        ("torchrun", "train.py"),
        "",
        "python train.py > log",
        "python train.py; echo done",
        "python train.py $STEPS",
        "python train.py 'a b'",
        "python train.py *.txt",
        "python train.py ~/data",
        "python train.py # comment",
        "python train.py\npython train.py",
        "OMP_NUM_THREADS=1 python train.py",
        "exec python train.py",
    ],
)
def test_anything_else_starts_cold(command):
    assert parse_warm_command(command) is None


def test_the_zygote_shares_what_is_read_before_the_script_runs_and_no_secret():
    env = {
        "PYTHONPATH": "/src",
        "OMP_NUM_THREADS": "1",
        "TORCH_LOGS": "+dynamo",
        "LD_PRELOAD": "x.so",
        "LANG": "C",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "RANK": "3",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "j1",
        "API_KEY": "secret",
        "PHALANX_TASK_KEY": "j1.1.0.n",
        "WORLD_SIZE": "4",
        "TF_CONFIG": "{}",
    }
    assert set(startup_environment(env)) == {
        "PYTHONPATH",
        "OMP_NUM_THREADS",
        "TORCH_LOGS",
        "LD_PRELOAD",
        "LANG",
        "PATH",
    }


def test_the_order_of_the_environment_does_not_matter():
    assert list(startup_environment({"PATH": "1", "LANG": "2"})) == list(
        startup_environment({"LANG": "2", "PATH": "1"})
    )
