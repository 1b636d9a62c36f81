"""Coordinates the final uploads of a member: checkpoints, outputs, log lines. For a gang on shared folders, log lines only."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from typing import Final

from phalanx.core.ids import Epoch, JobId
from phalanx.node.logic.happenings import CheckpointReported
from phalanx.node.logic.kept import checkpoints_of
from phalanx.node.shell import checkpoints, launching, saves
from phalanx.node.shell.link import HeadAccess
from phalanx.node.shell.outputs import Note, Outputs
from phalanx.node.shell.porter import Porter
from phalanx.node.shell.present import Present
from phalanx.node.shell.reports import RankReport
from phalanx.node.shell.shipping import Shipper

SHIP_LIMIT_S: Final = 30.0  # how long the end of a member waits for its last lines to reach the head


class Travel:
    """All uploads of one supervisor. Thread-safe. `hurried`, `resumed`: see Porter."""

    def __init__(
        self,
        access: HeadAccess,
        shipper: Shipper,
        ended: threading.Event,
        *,
        note: Note,
        hurried: Callable[[], bool],
        resumed: Callable[[JobId, Epoch], Collection[str]],
    ) -> None:
        self._shipper = shipper
        self._note = note
        self.porter = Porter(access, ended, hurried=hurried, resumed=resumed)
        self.outputs = Outputs(access, ended, note=note, hurried=hurried)

    def heard(self, member: Present, report: RankReport, publish: Callable[[CheckpointReported], None]) -> None:
        """Handle a rank's report. Outputs written until a save are uploaded before the save."""
        saves.hear(
            member,
            report,
            self.porter,
            note=lambda text: self._note(member, text),
            publish=publish,
            before=lambda: self.outputs.send(member),
        )

    def last(self, member: Present, done: Callable[[], None]) -> None:
        """No process of the member is left: call `done` when all is at the head, or after the time limits.

        One after the other, since each may still write a line to the job's log.
        """
        key, patient = member.key, member.ends_in_order

        def ship() -> None:
            self._shipper.when_shipped(launching.streams_of(member), SHIP_LIMIT_S, done)

        def send() -> None:
            self.outputs.when_sent(member, ship, patient=patient)

        self.porter.when_kept(key.job_id, key.epoch, send, patient=patient)

    def drop(self, job_id: JobId, epoch: Epoch) -> None:
        """The attempt is over for the head too: upload nothing more except log lines."""
        self.porter.drop(job_id, epoch)
        self.outputs.drop(job_id, epoch)

    def sweep(self, folders: Collection[str], members: Collection[Present]) -> None:
        """Bound the local checkpoint copies of jobs that have left this node. Empty folder names are skipped."""
        for folder in filter(None, folders):
            root = os.path.dirname(checkpoints_of(folder, JobId("none")))
            checkpoints.sweep_own(root, {str(one.key.job_id) for one in members})
