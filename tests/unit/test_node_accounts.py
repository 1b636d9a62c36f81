"""Whose account a job runs under, and that what is done with an account's rights is done with no others. The latter needs root."""

import ctypes
import errno
import os
import platform
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.core.ids import JobId
from phalanx.node.files import job_accounts
from phalanx.node.files.checkpoint_deletion import delete_checkpoints_as_owner
from phalanx.node.files.job_accounts import (
    JobAccountPolicy,
    acting_as,
    make_owned_folder,
    make_passable_folder,
    open_for_writing,
)
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.logic.accounts import NodeAccount, is_account_name, login_environment
from phalanx.node.member.scratch import Scratch
from phalanx.node.prepare import command_check, container_images
from phalanx.node.slurm_compat import batch_rank
from phalanx.wire.rank import LeasePage

SOMEBODY = NodeAccount(
    name="somebody", uid=61001, gid=61001, groups=(61001, 61010), home="/home/somebody", shell="/bin/sh"
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another account")


@pytest.fixture
def open_folder():
    """A folder that other accounts reach: pytest's own lies in ones that are closed to them."""
    with tempfile.TemporaryDirectory(prefix="phalanx-accounts-") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


@pytest.mark.parametrize("name", ["ada", "ada.lovelace", "_svc", "Ada-1", "host$"])
def test_names_of_accounts_are_known(name):
    assert is_account_name(name)


@pytest.mark.parametrize(
    "name", ["", "../root", "a b", "ada\n", "-x", "1001", "a:b", "ada@example.com", "a" * 40, "ada\0"]
)
def test_what_is_no_name_of_an_account_is_never_looked_up(name):
    assert not is_account_name(name)


def test_a_login_takes_over_where_things_are_and_nothing_that_may_be_a_secret():
    base = {
        "PATH": "/usr/bin",
        "LC_ALL": "C",
        "NCCL_IB_HCA": "mlx5",
        "AWS_SECRET_ACCESS_KEY": "x",
        "SSH_AUTH_SOCK": "/s",
        "HOME": "/root",
        "USER": "root",
        "SUDO_USER": "op",
        "http_proxy": "http://me:pw@proxy",
        "LD_PRELOAD": "/x.so",
        "PYTHONPATH": "/p",
        "PGPASSWORD": "x",
    }
    found = login_environment(base, SOMEBODY)
    assert found == {
        "PATH": "/usr/bin",
        "LC_ALL": "C",
        "NCCL_IB_HCA": "mlx5",
        "HOME": "/home/somebody",
        "USER": "somebody",
        "LOGNAME": "somebody",
        "SHELL": "/bin/sh",
    }


def test_a_supervisor_that_is_told_nothing_has_one_account_for_all():
    assert JobAccountPolicy.from_environment({}, "/n").account_for("whoever") is None


@pytest.mark.parametrize(
    "settings", [{"PHALANX_JOBS_AS": "root"}, {"PHALANX_JOBS_AS": "owner", "PHALANX_JOBS_UID_MIN": "-1"}]
)
@as_root
def test_a_setting_that_is_none_is_refused_and_not_passed_over(settings):
    with pytest.raises(ValueError, match="PHALANX_JOBS"):
        JobAccountPolicy.from_environment(settings, "/n")


@as_root
@pytest.mark.parametrize("user", ["daemon", "nobody-of-this-name", "../root", ""])
def test_only_accounts_of_people_may_be_run_under(user):
    with pytest.raises(PreparationFailed) as refused:
        JobAccountPolicy.from_environment({"PHALANX_JOBS_AS": "owner"}, "/n").account_for(user)
    assert refused.value.charge
    assert "\n" not in str(refused.value)


@as_root
def test_roots_own_jobs_may_be_forbidden():
    given = {"PHALANX_JOBS_AS": "owner"}
    assert JobAccountPolicy.from_environment(given, "/n").account_for("root") is None
    with pytest.raises(PreparationFailed, match="is refused"):
        JobAccountPolicy.from_environment({**given, "PHALANX_JOBS_AS_ROOT": "no"}, "/n").account_for("root")


@as_root
def test_within_an_accounts_rights_roots_files_are_closed_and_what_is_made_is_the_accounts(open_folder):
    secret = open_folder / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    theirs = open_folder / "theirs"
    make_owned_folder(str(theirs), None)
    os.chown(theirs, SOMEBODY.uid, SOMEBODY.gid)
    with acting_as(SOMEBODY):
        with pytest.raises(PermissionError):
            secret.read_text()
        with pytest.raises(PermissionError):
            secret.chmod(0o666)
        with pytest.raises(PermissionError):
            (open_folder / "new").write_text("")
        (theirs / "made").write_text("")
    assert (theirs / "made").stat().st_uid == SOMEBODY.uid
    assert secret.read_text() == "x"


@as_root
def test_one_threads_rights_are_not_anothers_and_come_back_after_an_error():
    groups = os.getgroups()
    meanwhile: list[str] = []
    inside, looked = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait(100)
        meanwhile.append(Path("/proc/thread-self/status").read_text())
        looked.set()

    thread = threading.Thread(target=other)
    thread.start()
    seen = []

    def fails() -> None:
        with acting_as(SOMEBODY):
            inside.set()
            looked.wait(100)
            seen.append(Path("/proc/thread-self/status").read_text())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    thread.join()
    assert "\t61001\n" in seen[0]
    assert "61001" not in meanwhile[0]
    assert "61001" not in Path("/proc/thread-self/status").read_text()
    assert os.getgroups() == groups


@as_root
def test_folders_of_jobs_are_refused_where_somebody_else_could_exchange_them(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="can be changed by accounts other than root"):
        make_passable_folder(str(shared / "jobs"))


@as_root
def test_folders_of_jobs_are_refused_where_accounts_could_not_reach_them(open_folder):
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(PermissionError, match="closed to the accounts"):
        make_passable_folder(str(closed / "jobs"))


@as_root
def test_a_link_in_the_place_of_a_folder_of_a_job_is_not_followed(open_folder):
    (open_folder / "jobs").mkdir()
    (open_folder / "jobs" / "1.1").symlink_to("/etc")
    with pytest.raises(OSError):
        make_owned_folder(str(open_folder / "jobs" / "1.1"), SOMEBODY)
    assert Path("/etc").stat().st_uid == 0


@as_root
def test_the_owner_of_its_folder_cannot_make_the_lease_page_shorter_or_lead_it_elsewhere(open_folder):
    victim = open_folder / "victim"
    victim.write_text("untouched")
    scratch = Scratch(path=str(open_folder / "1.1"), supervisor_path=str(open_folder / "own"), account=SOMEBODY)
    scratch.make()
    with acting_as(SOMEBODY):
        os.symlink(victim, f"{scratch.page}.new")
        os.symlink(victim, scratch.page)
    with scratch.open_folder() as folder:
        page = LeasePage.create(scratch.page, folder=folder, epoch=1, generation=0, deadline_ns=7)
    with acting_as(SOMEBODY):
        assert LeasePage.attach(scratch.page).read("deadline_ns") == 7
        for deed in (lambda: os.truncate(scratch.page, 0), lambda: os.chmod(scratch.page, 0o600)):
            with pytest.raises(PermissionError):
                deed()
    page.write(deadline_ns=8)
    page.close()
    assert victim.read_text() == "untouched"
    scratch.remove()
    assert victim.read_text() == "untouched"
    assert not os.path.lexists(scratch.path)


@as_root
def test_what_an_image_is_given_is_looked_for_with_the_accounts_rights(open_folder):
    for name, mode in (("theirs", 0o755), ("closed", 0o700)):
        (open_folder / name / "inner").mkdir(parents=True)
        (open_folder / name).chmod(mode)
    order = SimpleNamespace(output_dir="", checkpoint_dir=str(open_folder / "closed" / "inner"), candidates=())
    present: Any = SimpleNamespace(
        prepare=order,
        local_checkpoint=None,
        account=SOMEBODY,
        workdir=str(open_folder / "theirs" / "inner"),
        checkpoints="",
        outputs="",
        data=(),
        mps="",
        scratch=SimpleNamespace(path=""),
    )
    assert container_images._mounts(present) == (present.workdir,)


def test_a_pipe_in_the_place_of_a_script_holds_nobody(tmp_path, monkeypatch):
    script = tmp_path / "t.py"
    os.mkfifo(script)
    monkeypatch.setattr(os.path, "isfile", lambda _: True)  # as it was when it was looked at
    present: Any = SimpleNamespace(workdir=str(tmp_path))
    why = ended_with(lambda: command_check.judge_script("t.py", present, must_exist=True))
    assert why == errno.EINVAL


@pytest.mark.parametrize(
    "write", [lambda path: batch_rank._write(path, "x", 0o600), lambda path: os.close(open_for_writing(path))]
)
def test_a_pipe_in_the_place_of_what_is_written_holds_nobody(tmp_path, write):
    path = str(tmp_path / "f")
    write(path)
    os.unlink(path)
    os.mkfifo(path)
    assert ended_with(lambda: write(path)) == errno.ENXIO
    reader = os.open(path, os.O_RDWR)
    assert ended_with(lambda: write(path)) == errno.EINVAL
    os.close(reader)


def ended_with(work: Callable[[], None]) -> int | None:
    """The disk's number for why it ended; None where it has not."""
    ended: list[int | None] = []

    def run() -> None:
        try:
            work()
        except OSError as error:
            ended.append(error.errno)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=60)
    return ended[0] if ended else None


@as_root
def test_a_link_in_the_owners_path_deletes_nobody_elses_checkpoints(open_folder):
    class Always(JobAccountPolicy):
        def account_for(self, user: str) -> NodeAccount | None:
            return SOMEBODY

    kept, own = open_folder / "ben" / "7-k" / "epoch-1-k" / "step-00000001", open_folder / "ada"
    kept.mkdir(parents=True)
    own.mkdir()
    os.chown(own, SOMEBODY.uid, SOMEBODY.gid)
    with acting_as(SOMEBODY):
        (own / "7-k").symlink_to(open_folder / "ben" / "7-k")
        (own / "8-k" / "epoch-1-k" / "step-00000001").mkdir(parents=True)
    for job in ("7", "8"):
        delete_checkpoints_as_owner(Always(), JobId(job), (f"{own}/{job}-k/epoch-1-k/step-00000001",), "somebody")
    assert kept.is_dir()
    assert not (own / "8-k" / "epoch-1-k").exists()


def test_where_the_kernel_knows_no_such_call_jobs_keep_one_account(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "sparc")
    assert JobAccountPolicy.from_environment({"PHALANX_JOBS_AS": "owner"}, "/n").supervisor_account == ""


@as_root
def test_rights_that_are_refused_leave_nothing_done(monkeypatch):
    def refused(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(job_accounts._libc, "syscall", refused, raising=False)
    done = []
    with pytest.raises(OSError), acting_as(SOMEBODY):
        done.append("deed")
    assert done == []
