"""Bugs of the store and of the accounts."""

from dataclasses import replace

from phalanx.controller.audit_trail import AuditTrail
from phalanx.controller.requests import labels
from phalanx.core.state import world as worlds
from phalanx.core.state.world import WorldChange
from phalanx.core.work.queue import add_usage
from phalanx.ports.store import StoreRefused
from phalanx.store import commit_checks
from phalanx.store.sql.sqlite import store as sqlite
from phalanx.store.sql.sqlite.connections import open_writer
from phalanx.store.sql.sqlite.store import SqliteStore
from tests.simulation.planted.bug import planted


@planted(3, seed=8, sqlite=True)
def commit_is_not_synced(patch):
    """SQLite writes the WAL without a sync at each commit (synchronous=NORMAL)."""

    def careless(path, vfs, *, held):
        writer = open_writer(path, vfs, held=held)
        writer.pragma("synchronous", 1)
        return writer

    patch.setattr(sqlite, "open_writer", careless)


@planted(3, seed=17, sqlite=True)
def commit_is_split_in_two(patch):
    """Records and their history lines are written in two transactions; power may fail between them."""
    commit = SqliteStore.commit

    def halved(self, batch):
        commit(self, replace(batch, history=()))
        commit(self, replace(batch, records=(), removed=(), epochs={}, audit=()))

    patch.setattr(SqliteStore, "commit", halved)


@planted(3, seed=8, sqlite=True)
def history_line_is_cut_short(patch):
    """The store truncates the text of a history line. Nothing reads the line before a user does."""
    commit = SqliteStore.commit

    def short(self, batch):
        commit(self, replace(batch, history=[replace(line, text=line.text[:60]) for line in batch.history]))

    patch.setattr(SqliteStore, "commit", short)


@planted(24, seed=6, sqlite=True)
def full_disk_is_acknowledged_as_a_commit(patch):
    """The store ignores the error of a full disk, and the head acknowledges data that is not stored."""
    commit = SqliteStore.commit

    def swallowing(self, batch):
        try:
            commit(self, batch)
        except StoreRefused:
            pass

    patch.setattr(SqliteStore, "commit", swallowing)


@planted(19, seed=5)
def numbers_of_refused_history_lines_are_lost(patch):
    """After a refused commit, history lines continue past the numbers that were not written, and the store accepts the gap."""
    undo = WorldChange.undo

    def forgetful(self):
        next_seq = self.world.next_history_seq
        undo(self)
        self.world.next_history_seq = next_seq

    patch.setattr(WorldChange, "undo", forgetful)
    patch.setattr(commit_checks, "check_history", lambda history, last_seq: None)


@planted(18, seed=0)
def short_runs_are_not_billed(patch):
    """Usage of less than a minute by an attempt is charged to no queue."""
    patch.setattr(
        worlds,
        "add_usage",
        lambda queues, spent, queue, gpus, from_s, to_s, *speed: (
            add_usage(queues, spent, queue, gpus, from_s, to_s, *speed) if to_s - from_s >= 60.0 else []
        ),
    )


@planted(18, seed=0)
def gpu_seconds_are_billed_twice(patch):
    """At the end of an attempt its queues are charged twice."""
    patch.setattr(
        worlds,
        "add_usage",
        lambda queues, spent, queue, gpus, from_s, to_s, *speed: add_usage(
            queues, spent, queue, 2 * gpus, from_s, to_s, *speed
        ),
    )


@planted(6, seed=0, resources=True)
def licence_is_not_given_back_after_a_restart(patch):
    """A job that was restarted ends, and its seats of a licence stay in use."""
    count = WorldChange._count_licences

    def forgetful(self, attempt):
        if attempt.holds_allocation or not (attempt.generation or attempt.epoch > 1):
            count(self, attempt)

    patch.setattr(WorldChange, "_count_licences", forgetful)


@planted(18, seed=0, resources=True)
def cpus_past_sixteen_are_not_billed(patch):
    """At the end of an attempt its queues are charged at most 16 CPUs."""
    patch.setattr(
        worlds,
        "add_usage",
        lambda queues, spent, queue, held, from_s, to_s, *speed: add_usage(
            queues, spent, queue, replace(held, cpus=min(held.cpus, 16)), from_s, to_s, *speed
        ),
    )


@planted(2, seed=1)
def relabelled_node_loses_its_cordon(patch):
    """A change of a node's labels lifts its cordon."""
    patch.setattr(labels, "replace", lambda node, **fields: replace(node, cordon=None, **fields))


@planted(19, seed=10)
def audit_line_follows_one_that_was_refused(patch):
    """The end of the audit trail moves before the commit, so after a refused commit the next line is chained to one that does not exist."""
    next_lines = AuditTrail.next_lines

    def early(self, requests, at_s):
        lines = next_lines(self, requests, at_s)
        if lines:
            self.resume_after(lines[-1])
        return lines

    patch.setattr(AuditTrail, "next_lines", early)
