"""What a head that begins to lead sets aside: files under numbers that its database has lost, and nothing else."""

import errno
import os
from dataclasses import replace

import pytest

from phalanx.failpoints import FailureMode, armed
from phalanx.ports.store import StaleLeader
from phalanx.store.errors import StoreUnusable
from phalanx.store.lost_numbers import (
    RESTORES_KEPT,
    DatabaseExtent,
    RestoreRecord,
    extend_terms,
    move_lost_files,
    parse_restores,
    with_certainty,
    with_restore,
)

NOBODY = 65534
OF_KNOWN = [
    "checkpoints/3/epoch-2",
    "checkpoints/8/epoch-9",
    "logs/.tmp",
    "logs/3/1",
    "logs/3/2",
    "logs/5_11/1",
    "logs/8/9",
    "outputs/3",
    "outputs/8/epoch-70",
]
OF_LOST = ["checkpoints/3/epoch-3", "checkpoints/9/epoch-1", "logs/3/3", "logs/12/1", "logs/9_0/1", "outputs/9"]
# Jobs up to 8; 3 runs its second attempt, 8 and the array 5 have ended and are no longer in memory.
NOW = DatabaseExtent(last_job_seq=8, epochs={"3": 2, "7": 0})


def files(folder, paths):
    for path in paths:
        (folder / path).mkdir(parents=True, exist_ok=True)


def left(folder):
    """Innermost folders that were not set aside, and marks not among them."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if "before" not in str(path.relative_to(folder)) and path.is_dir() and not list(path.iterdir())
    )


def leads():
    """Nobody else does."""


def stands_by():
    raise StaleLeader("another head leads")


def restore(number, last, **epochs):
    return RestoreRecord(id=f"{number:016x}", extent=DatabaseExtent(last_job_seq=last, epochs=epochs), term=number)


def test_files_of_known_jobs_stay_whether_they_run_ended_or_are_forgotten(tmp_path):
    files(tmp_path, OF_KNOWN)
    assert move_lost_files(str(tmp_path), NOW, [], "now", check_allowed=stands_by) == []
    assert left(tmp_path) == OF_KNOWN


def test_files_under_numbers_that_will_be_given_out_again_make_way(tmp_path):
    files(tmp_path, [*OF_KNOWN, *OF_LOST])
    made = move_lost_files(str(tmp_path), NOW, [], "now", check_allowed=leads)
    assert [os.path.basename(path) for path in made] == [
        f"{name}.before-restore-now" for name in ("logs", "outputs", "checkpoints")
    ]
    assert left(tmp_path) == OF_KNOWN
    assert move_lost_files(str(tmp_path), NOW, [], "again", check_allowed=stands_by) == []


@pytest.mark.parametrize("path", OF_LOST)
def test_each_of_them_is_found_alone(tmp_path, path):
    files(tmp_path, [*OF_KNOWN, path])
    assert len(move_lost_files(str(tmp_path), NOW, [], "now", check_allowed=leads)) == 1
    assert left(tmp_path) == OF_KNOWN


def test_a_head_that_lost_its_term_moves_nothing(tmp_path):
    files(tmp_path, [*OF_KNOWN, *OF_LOST])
    with pytest.raises(StaleLeader):
        move_lost_files(str(tmp_path), NOW, [], "now", check_allowed=stands_by)
    assert left(tmp_path) == sorted([*OF_KNOWN, *OF_LOST])


def test_it_is_asked_before_each_that_moves(tmp_path):
    files(tmp_path, OF_LOST)
    asked = []

    def may():
        asked.append(1)
        if len(asked) == 3:
            stands_by()

    with pytest.raises(StaleLeader):
        move_lost_files(str(tmp_path), NOW, [], "now", check_allowed=may)
    assert len(left(tmp_path)) == len(OF_LOST) - 1


def test_a_head_that_leads_only_after_others_gave_the_numbers_out_again_makes_way_too(tmp_path):
    """Job 3 had a third attempt and jobs 6 to 8 were there; all of it was lost, and is there again, other jobs, when this head leads."""
    files(tmp_path, ["logs/3/2", "logs/3/3", "logs/5/1", "logs/6/1", "outputs/8"])
    restored = restore(1, 5, **{"3": 2})
    now = DatabaseExtent(last_job_seq=20, epochs={"3": 4, "6": 1})
    move_lost_files(str(tmp_path), now, [restored], "now", check_allowed=leads)
    assert left(tmp_path) == ["logs/3/2", "logs/5/1", "outputs"]


def test_what_came_after_the_restore_stays_at_the_next_lead(tmp_path):
    restored = restore(1, 5)
    now = DatabaseExtent(last_job_seq=20, epochs={})
    move_lost_files(str(tmp_path), now, [restored], "now", check_allowed=leads)
    files(tmp_path, ["logs/6/1", "outputs/20"])
    assert move_lost_files(str(tmp_path), now, [restored], "again", check_allowed=stands_by) == []
    files(tmp_path, ["logs/6/1"])
    assert move_lost_files(str(tmp_path), now, [restored, restore(2, 19)], "next", check_allowed=leads) != []
    assert left(tmp_path) == ["logs/6/1", "outputs"]


def test_a_mark_that_cannot_be_looked_for_is_not_taken_for_none(tmp_path, monkeypatch):
    files(tmp_path, ["logs/6/1"])
    stat = os.stat

    def failing(path, **options):
        if ".restored" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(OSError, match="Input/output"):
        move_lost_files(
            str(tmp_path), DatabaseExtent(last_job_seq=20, epochs={}), [restore(1, 5)], "now", check_allowed=leads
        )
    assert left(tmp_path) == ["logs/6/1"]


def test_of_several_restores_meanwhile_the_one_that_reached_least_counts(tmp_path):
    files(tmp_path, ["logs/5/1", "logs/6/1"])
    move_lost_files(
        str(tmp_path),
        DatabaseExtent(last_job_seq=40, epochs={}),
        [restore(1, 5), restore(2, 30)],
        "now",
        check_allowed=leads,
    )
    assert left(tmp_path) == ["logs/5/1"]


@pytest.mark.parametrize("point", ["restore.later.directory", "restore.later.rename", "restore.mark.create"])
def test_a_disk_that_refuses_leaves_it_to_the_next_try(tmp_path, point):
    files(tmp_path, ["logs/5/1", "logs/6/1"])
    now, restored = DatabaseExtent(last_job_seq=40, epochs={}), restore(1, 5)
    with armed(point, FailureMode.FULL), pytest.raises(OSError, match="failpoint"):
        move_lost_files(str(tmp_path), now, [restored], "now", check_allowed=leads)
    move_lost_files(str(tmp_path), now, [restored], "again", check_allowed=leads)
    assert left(tmp_path) == ["logs/5/1"]
    files(tmp_path, ["logs/6/1"])
    assert move_lost_files(str(tmp_path), now, [restored], "third", check_allowed=stands_by) == []


def test_word_of_a_restore_is_read_as_it_was_written_and_the_newest_are_kept():
    restores = [restore(number, number, **{"3": number, "4_1": 0}) for number in range(RESTORES_KEPT + 2)]
    text = ""
    for one in restores:
        text = with_restore(text, one)
    assert parse_restores(text) == restores[2:]
    assert parse_restores("") == []


def terms(*taken):
    """What stands in the database once whoever took these terms has said so."""
    text = ""
    for term in taken:
        text = extend_terms(text, term)
    return text


@pytest.mark.parametrize(
    ("taken", "term", "certain"),
    [
        ((4,), 5, True),
        ((3, 4, 5, 6), 7, True),
        ((2, 4), 5, True),
        ((4,), 6, False),
        ((4, 6, 7), 8, False),
        ((5, 6), 7, False),
        ((), 5, False),
    ],
)
def test_a_restore_is_certain_only_while_all_who_took_a_term_since_know_of_restores(taken, term, certain):
    """Found by reading: a head of the release before marks no folder, and what it had written since made way under the jobs that ran."""
    assert [one.certain for one in with_certainty([restore(4, 5)], terms(*taken), term)] == [certain]


@pytest.mark.parametrize("text", ["", "x", "1", "1 2 3", "-1 4", "a b"])
def test_of_terms_that_cannot_be_read_nothing_is_certain(text):
    assert not with_certainty([restore(4, 5)], text, 5)[0].certain


def test_a_restore_that_is_not_certain_moves_nothing_and_is_marked(tmp_path):
    files(tmp_path, ["logs/6/1", "outputs/20"])
    doubtful = replace(restore(1, 5), certain=False)
    assert (
        move_lost_files(
            str(tmp_path), DatabaseExtent(last_job_seq=20, epochs={}), [doubtful], "now", check_allowed=leads
        )
        == []
    )
    assert left(tmp_path) == ["logs/6/1", "outputs/20"]
    assert (
        move_lost_files(
            str(tmp_path), DatabaseExtent(last_job_seq=20, epochs={}), [restore(1, 5)], "next", check_allowed=leads
        )
        == []
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another account")
def test_folder_that_cannot_be_listed_keeps_no_head_from_leading(tmp_path):
    """Its job has ended, or runs: nothing of it is seen to be lost, as before the loss of another."""
    files(tmp_path, ["logs/9/1", "checkpoints/3", "checkpoints/7"])
    for job in ("3", "7"):
        (tmp_path / "checkpoints" / job).chmod(0)
    (tmp_path / "logs/4").write_text("a stray file")
    for path in (tmp_path, tmp_path / "logs", tmp_path / "logs/9", tmp_path / "checkpoints"):
        os.chown(path, NOBODY, NOBODY)
    for path in tmp_path.parents:  # pytest's own are closed to others
        if not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            move_lost_files(str(tmp_path), NOW, [], "now", check_allowed=leads)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert os.listdir(tmp_path / "logs.before-restore-now") == ["9"]


@pytest.mark.parametrize(
    "text", ["{", "[1]", '[["a", "b", "c", 1]]', '[["0123456789abcdef", 1, {"1": "x"}, 1]]', "[[1, 2, {}, 1]]"]
)
def test_word_that_cannot_be_read_stops_a_head(text):
    with pytest.raises(StoreUnusable, match="shared"):
        parse_restores(text)
