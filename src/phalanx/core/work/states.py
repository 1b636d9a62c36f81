"""The states of a job and of an attempt, and why a job waits: words alone, for programs that need no records."""

from __future__ import annotations

import enum
from typing import Final


class JobState(enum.StrEnum):
    """PENDING waits (or waits again); the last four are terminal and never change."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"

    @property
    def terminal(self) -> bool:
        """Whether the job has ended for good."""
        return self in TERMINAL_STATES


TERMINAL_STATES: Final = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT})


class WaitReasonCode(enum.StrEnum):
    """Why a job waits: the one dominant reason."""

    NEW = "new"  # not yet considered
    RESOURCES = "resources"  # fits the fleet, but not the free capacity
    NO_NODES = "no_nodes"  # no node is up
    NEVER = "never"  # can never start: it exceeds the fleet or a limit even alone
    NODES_DOWN = "nodes_down"  # would fit if nodes that are down or cordoned came back
    HELD = "held"
    PARKED = "parked"  # gave its GPUs back until it is resumed
    QUEUE_CLOSED = "queue_closed"
    BACKOFF = "backoff"  # short wait after a failed start
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    CRASH = "crash"
    START_FAIL = "start_fail"
    REQUEUED = "requeued"
    DRAINED = "drained"  # its node was drained while it ran
    CONTENDED = "contended"  # a shared engine gave its place to other jobs
    ENGINE_LIMIT = "engine_limit"  # a limit of a shared engine keeps it from starting
    MOVED = "moved"  # continues elsewhere shortly
    DEPENDENCY = "dependency"  # other jobs must end first
    STAGING = "staging"  # its data is copied to its nodes before it holds GPUs
    BEGIN_TIME = "begin_time"  # not before the requested begin time
    ARRAY_LIMIT = "array_limit"  # the array's limit of running elements is reached
    QUOTA = "quota"  # its queue is at its quota
    USER_LIMIT = "user_limit"  # its user is at the queue's limit per user
    BUDGET = "budget"  # its queue has spent its GPU-hours of the period
    LICENCE = "licence"  # other jobs hold the seats of a licence
    TOPOLOGY = "topology"  # enough is free, but not within one domain
    PRIORITY = "priority"  # jobs ahead of it take the free capacity
    RESERVATION = "reservation"  # nodes are reserved
    CLAIMED = "claimed"  # running jobs on its nodes save and stop first


class AttemptState(enum.StrEnum):
    """PLACED -> STARTING -> RUNNING -> STOPPING -> ENDED; an in-place restart goes back to PLACED under the same epoch."""

    PLACED = "placed"  # committed; supervisors verify their devices and wait at the barrier
    STARTING = "starting"  # ranks and addresses are assigned
    RUNNING = "running"  # every rank has been exec'd
    STOPPING = "stopping"  # asked to end, or partly ended; waits until every member is accounted for
    ENDED = "ended"
