"""An operator's hooks: what their file may say, what their ends mean, and that a program that hangs or forks holds nothing up."""

# mypy: disable-error-code="arg-type"

import json
import os
import threading

import pytest

from phalanx.core.state.reports import NodeHealthReported
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic.operator_hooks import (
    HookEffect,
    HookKind,
    HookRun,
    HooksInvalid,
    OperatorHook,
    judge_hook,
    last_line,
    parse_hooks,
)
from phalanx.node.prepare.hook_runner import OperatorHooks, hooks_file, load_hooks, run_hook
from tests.unit.test_unshared_folders import make_prepare, member


def prolog(**changed):
    return OperatorHook(kind=HookKind.PROLOG, program=("/opt/check",), **changed)


def test_file_names_programs_by_kind_queue_and_node():
    text = """
    [[epilog]]
    program = ["/opt/wipe", "--all"]
    [[prolog]]
    program = "/opt/check"
    timeout_s = 5
    queues = ["gold"]
    nodes = ["n1"]
    exit_codes = { 3 = "fail", 4 = "warn" }
    on_timeout = "warn"
    """
    first, second = parse_hooks(text)
    assert first == prolog(
        timeout_s=5.0,
        queues=frozenset({"gold"}),
        nodes=frozenset({"n1"}),
        exit_codes=((3, HookEffect.FAIL), (4, HookEffect.WARN)),
        on_timeout=HookEffect.WARN,
    )
    assert (second.kind, second.program, second.timeout_s) == (HookKind.EPILOG, ("/opt/wipe", "--all"), 60.0)
    assert [first.concerns(*case) for case in (("n1", "gold"), ("n1", "default"), ("n2", "gold"))] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[prolog]]\nprogram = 'check'", "absolute path, not 'check'"),
        ("[[prolog]]\nprogram = []", "path, or a list"),
        ("[[prolog]]\ntimeout_s = 5", "program must be"),
        ("[[prolog]]\nprogram = '/a'\ntimeout_s = true", "timeout_s must be"),
        ("[[prolog]]\nprogram = '/a'\ntimeout_s = nan", "timeout_s must be"),
        ("[[prolog]]\nprogram = '/a'\nexit_codes = { 0 = 'fail' }", "0 always means to go on"),
        ("[[epilog]]\nprogram = '/a'\nexit_codes = { 1 = 'fail' }", "no effect of this hook"),
        ("[[health]]\nprogram = '/a'\nqueues = ['gold']", "no queues"),
        ("[[health]]\nprogram = '/a'\nuser = 'root'", "'user' is unknown"),
        ("[[start]]\nprogram = '/a'", "[[start]] is unknown"),
        ("[prolog]\nprogram = '/a'", "write [[prolog]]"),
        ("[[prolog", "Expected"),
    ],
)
def test_wrong_file_is_refused_with_the_place(text, says):
    with pytest.raises(HooksInvalid, match=None) as refused:
        parse_hooks(text)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("run", "effect", "text"),
    [
        (HookRun(code=0, last_line="fine"), HookEffect.NONE, ""),
        (HookRun(code=1, last_line="ECC"), HookEffect.DRAIN, "prolog check ended with code 1: ECC"),
        (HookRun(code=3), HookEffect.FAIL, "prolog check ended with code 3"),
        (HookRun(code=None), HookEffect.DRAIN, "prolog check timed out after 60 s"),
        (HookRun(code=None, error="cannot start: x"), HookEffect.DRAIN, "prolog check cannot start: x"),
    ],
)
def test_end_of_a_program_has_an_effect_and_a_sentence(run, effect, text):
    assert judge_hook(prolog(exit_codes=((3, HookEffect.FAIL),)), run) == (effect, text)


def test_last_line_is_printable_and_short():
    assert last_line(b"first\nGPU 3:\x1b[31m bad\xff\x00\n\n  \n") == "GPU 3: [31m bad\ufffd"
    assert len(last_line(b"x" * 5000)) == 200


# -------------------------------------------------------------------------------------------------- programs that really run


@pytest.fixture
def node(tmp_path):
    """A node with the file of hooks, and the programs of `write`."""

    class Node:
        path = tmp_path / "hooks.toml"
        reports: list[NodeHealthReported] = []  # noqa: RUF012  one for each fixture

        def write(self, name: str, script: str) -> str:
            program = tmp_path / name
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
            return str(program)

        def hooks(self, text: str) -> OperatorHooks:
            self.path.write_text(text)
            self.reports = []
            return OperatorHooks(str(self.path), "n0", str(tmp_path / "node"), "key", self.reports.append)

        def member(self):
            return member(make_prepare(), 0, tmp_path)

    os.umask(0o022)
    return Node()


def hook(program, **changed):
    return OperatorHook(kind=HookKind.PROLOG, program=(program,), **changed)


def test_program_that_hangs_is_killed_with_its_process_group(node):
    program = node.write("hang", f'echo "lspci hangs"; sleep 600 & echo $! > {node.path}.pid; wait')
    run = run_hook(hook(program, timeout_s=0.3), {"PATH": os.environ["PATH"]})
    assert (run.code, run.last_line) == (None, "lspci hangs")
    with open(f"{node.path}.pid", encoding="ascii") as file:
        pid = int(file.read())
    assert not os.path.exists(f"/proc/{pid}") or "Z" in open(f"/proc/{pid}/stat", encoding="ascii").read()  # noqa: SIM115


def test_program_that_forks_twice_and_keeps_its_output_open_holds_nothing_up(node):
    program = node.write("fork", "(setsid sleep 20 &) ; echo done; exit 7")
    run = run_hook(hook(program, timeout_s=15.0), {"PATH": os.environ["PATH"]})
    assert (run.code, run.last_line) == (7, "done")


def test_stop_of_the_job_ends_the_program(node):
    cancelled = threading.Event()
    cancelled.set()
    assert run_hook(hook(node.write("slow", "exec sleep 600")), {"PATH": os.environ["PATH"]}, cancelled).code is None


def test_failing_prolog_refuses_the_node_and_the_epilog_runs_once(node):
    log = f"{node.path}.log"
    bad = node.write("bad", 'echo "ECC errors on GPU 2"; exit 1')
    wipe = node.write("wipe", f"echo $PHALANX_HOOK $PHALANX_JOB_ID $PHALANX_NODE >> {log}")
    hooks, job = node.hooks(f"[[prolog]]\nprogram='{bad}'\n[[epilog]]\nprogram='{wipe}'"), node.member()
    with pytest.raises(PreparationFailed) as refused:
        hooks.before_job(job, ("uuid-0",), lambda _: None)
    why = "prolog bad ended with code 1: ECC errors on GPU 2"
    assert (str(refused.value), refused.value.node_fault, refused.value.charge) == (why, True, False)
    assert node.reports == [
        NodeHealthReported(node_id="n0", why="", checked=True),
        NodeHealthReported(node_id="n0", why=why, checked=False),
    ]
    hooks.after_job(job)
    hooks.after_job(job)
    with open(log, encoding="utf-8") as file:
        assert file.read() == f"epilog {job.key.job_id} n0\n"


def test_job_that_the_prolog_rejects_fails_and_a_warning_goes_on(node):
    notes: list[str] = []
    warn = node.write("warn", "echo low disk; exit 4")
    fail = node.write("fail", "echo no licence; exit 3")
    codes = "exit_codes={3='fail',4='warn'}"
    hooks = node.hooks(f"[[prolog]]\nprogram='{warn}'\n{codes}\n[[prolog]]\nprogram='{fail}'\n{codes}")
    with pytest.raises(PreparationFailed) as refused:
        hooks.before_job(node.member(), (), notes.append)
    assert (refused.value.charge, refused.value.node_fault, refused.value.exit_code) == (True, False, 3)
    assert notes == ["prolog warn ended with code 4: low disk"]


def test_supervisor_that_died_between_prolog_and_ranks_leaves_the_epilog_to_the_next_one(node):
    log = f"{node.path}.log"
    text = f"[[epilog]]\nprogram='{node.write('wipe', f'echo $PHALANX_DEVICE_UUIDS >> {log}; exit 1')}'"
    node.hooks(text).before_job(node.member(), ("uuid-0", "uuid-1"), lambda _: None)
    next_one = node.hooks(text)
    next_one.recover()
    next_one.recover()
    with open(log, encoding="utf-8") as file:
        assert file.read() == "uuid-0,uuid-1\n"
    assert [(one.why, one.checked) for one in node.reports] == [("epilog wipe ended with code 1", False)]


def test_health_check_reports_changes_only_and_a_sound_node_returns(node):
    state = f"{node.path}.state"
    hooks = node.hooks(f"[[health]]\nprogram='{node.write('nhc', f'cat {state}; test ! -s {state}')}'")
    ended = threading.Event()

    def check(content):
        with open(state, "w", encoding="utf-8") as file:
            file.write(content)
        return hooks._check_health(0.0, ended)

    assert [check(""), check(""), check("xid 79"), check("xid 79"), check("")] == [
        "",
        "",
        *["health check nhc ended with code 1: xid 79"] * 2,
        "",
    ]
    assert [bool(one.why) for one in node.reports] == [False, True, False]


def test_what_another_account_can_change_is_never_run(node, tmp_path):
    program = node.write("check", "exit 0")
    hooks = node.hooks(f"[[prolog]]\nprogram='{program}'")
    os.chmod(program, 0o775)
    with pytest.raises(PreparationFailed, match="can be changed by other accounts"):
        hooks.before_job(node.member(), (), lambda _: None)
    os.chmod(program, 0o755)
    assert load_hooks(str(node.path))
    os.chmod(tmp_path, 0o777)
    with pytest.raises(HooksInvalid, match="can be changed by other accounts"):
        load_hooks(str(node.path))
    os.chmod(tmp_path, 0o1777)
    assert load_hooks(str(node.path))
    os.chmod(tmp_path, 0o700)
    os.remove(program)
    with pytest.raises(HooksInvalid, match="No such file"):
        load_hooks(str(node.path))


def test_file_is_that_of_root_or_of_the_account():
    assert hooks_file({"PHALANX_HOOKS": ""}) == ""
    expected = "/etc/phalanx/hooks.toml" if os.geteuid() == 0 else "/h/.config/phalanx/hooks.toml"
    assert hooks_file({"HOME": "/h"}) == expected
    assert load_hooks("/nonexistent/hooks.toml") == ()


def test_journal_names_no_secret(node):
    hooks = node.hooks(f"[[epilog]]\nprogram='{node.write('wipe', 'exit 0')}'")
    hooks.before_job(node.member(), (), lambda _: None)
    (name,) = os.listdir(node.path.parent / "node" / "hooks")
    content = json.loads((node.path.parent / "node" / "hooks" / name).read_text())
    assert all(key.startswith("PHALANX_") for key in content)


def test_symbolic_link_that_another_account_can_replace_is_not_followed(node, tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    (open_folder / "check").symlink_to("/bin/true")
    node.path.write_text(f"[[prolog]]\nprogram='{open_folder}/check'")
    assert load_hooks(str(node.path))
    open_folder.chmod(0o777)
    with pytest.raises(HooksInvalid, match="open can be changed by other accounts"):
        load_hooks(str(node.path))
    (tmp_path / "round").symlink_to("round")
    node.path.write_text(f"[[prolog]]\nprogram='{tmp_path}/round'")
    with pytest.raises(HooksInvalid, match="more than 40 symbolic links"):
        load_hooks(str(node.path))


def test_epilog_that_goes_wrong_inside_phalanx_still_lets_the_devices_free(node, monkeypatch):
    hooks, job = node.hooks(f"[[epilog]]\nprogram='{node.write('wipe', 'exit 0')}'"), node.member()
    hooks.before_job(job, (), lambda _: None)

    def broken(*_):
        raise RuntimeError("no thread")

    monkeypatch.setattr("phalanx.node.prepare.hook_runner.run_hook", broken)
    hooks.after_job(job)
    assert [one.why for one in node.reports if one.why] == ["epilog: no thread"]
