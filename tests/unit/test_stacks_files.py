"""What a rank leaves for its stacks is read as a stranger's file: no link, no pipe, nothing of another account, never more than a bound."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.node.diagnosis import stack_dumps
from phalanx.wire.rank import stack_file


@pytest.fixture
def member(tmp_path):
    return SimpleNamespace(scratch=SimpleNamespace(path=str(tmp_path)), account=None)


def planted(member, make):
    path = stack_file(member.scratch.path, 0, 7)
    make(path)
    return stack_dumps._size(member, 0, 7)


def test_plain_file_of_the_jobs_own_is_read(member):
    assert planted(member, lambda path: Path(path).write_text("File")) == 4


def test_link_is_not_followed(member, tmp_path):
    (tmp_path / "secret").write_text("root:x:0:0")
    assert planted(member, lambda path: os.symlink(tmp_path / "secret", path)) is None


def test_pipe_holds_nobody_up(member):
    assert planted(member, os.mkfifo) is None


def test_file_of_another_account_is_not_read(member):
    member.account = SimpleNamespace(uid=os.getuid() + 1)
    assert planted(member, lambda path: Path(path).write_text("File")) is None


def test_link_put_in_the_files_place_after_the_look_is_not_followed(member, tmp_path):
    (tmp_path / "secret").write_text("root:x:0:0" * 100)
    os.symlink(tmp_path / "secret", stack_file(member.scratch.path, 0, os.getpid()))
    assert stack_dumps._answer(member, 0, os.getpid(), 0, 0.0) == ""


def test_dump_is_cut(member):
    with open(stack_file(member.scratch.path, 0, os.getpid()), "w", encoding="utf-8") as file:
        file.write("x" * (stack_dumps.STACK_BYTES_MAX * 2))
    assert len(stack_dumps._answer(member, 0, os.getpid(), 0, 0.0)) == stack_dumps.STACK_BYTES_MAX
