"""Identifiers. Each has its own type, so that a node id cannot be passed as a job id."""

from __future__ import annotations

from typing import NewType

JobId = NewType("JobId", str)  # decimal, in submit order: "1", "2", ...; elements of an array "7_0", "7_1", ...
NodeId = NewType("NodeId", str)  # the node's name, as a user types it: "n0", "gpu007"
UserId = NewType("UserId", str)  # the user's name
ProjectId = NewType("ProjectId", str)
QueueId = NewType("QueueId", str)
ServiceId = NewType("ServiceId", str)  # the service's name
ReservationId = NewType("ReservationId", str)
TokenId = NewType("TokenId", str)  # identifies a token; not the secret itself
PoolId = NewType("PoolId", str)  # the name of a node pool
SupervisorId = NewType("SupervisorId", str)  # one incarnation of a supervisor process

Epoch = NewType("Epoch", int)  # per job, 1 for its first attempt
Generation = NewType("Generation", int)  # in-place restarts within one epoch, from 0
