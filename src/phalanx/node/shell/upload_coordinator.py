"""Coordinates the final uploads of a member: checkpoints, outputs, log lines. For a gang on shared folders, log lines only."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection
from typing import Final

from phalanx.core.ids import Epoch, JobId
from phalanx.node.files import checkpoint_folders
from phalanx.node.head_link.head_connection import HeadAccess
from phalanx.node.logic.events import CheckpointReported
from phalanx.node.logic.local_copies import checkpoints_root
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.member.rank_reports import RankReport
from phalanx.node.transfer import checkpoint_report_handler
from phalanx.node.transfer.checkpoint_upload import CheckpointUploader
from phalanx.node.transfer.output_sync import OutputSync, WriteNote
from phalanx.node.transfer.stream_upload import StreamUploader

SEND_AT_ONCE_S: Final = 0.5  # output that the head has within this time is there when the job ends, without further ado
SEND_LAST_S: Final = 30.0  # the same where the supervisor ends with the member, and sends nothing later


class UploadCoordinator:
    """All uploads of one supervisor. Thread-safe. `shutting_down`, `resumed`: see Porter. `outlives_members`: it sends output after them."""

    def __init__(
        self,
        access: HeadAccess,
        shipper: StreamUploader,
        ended: threading.Event,
        *,
        note: WriteNote,
        shutting_down: Callable[[], bool],
        resume_folders: Callable[[JobId, Epoch], Collection[str]],
        outlives_members: bool = True,
    ) -> None:
        self._shipper = shipper
        self._note = note
        self._shutting_down, self._outlives_members = shutting_down, outlives_members
        self.checkpoint_uploader = CheckpointUploader(
            access, ended, shutting_down=shutting_down, resume_folders=resume_folders
        )
        self.output_sync = OutputSync(access, ended, note=note, shutting_down=shutting_down)

    def on_report(
        self, member: MemberRuntime, report: RankReport, publish: Callable[[CheckpointReported], None]
    ) -> None:
        """Handle a rank's report. Outputs written until a save are uploaded before the save."""
        checkpoint_report_handler.handle_checkpoint_report(
            member,
            report,
            self.checkpoint_uploader,
            note=lambda text: self._note(member, text),
            publish=publish,
            before_upload=lambda: self.output_sync.send_changes(member),
        )

    def finish_member(self, member: MemberRuntime, done: Callable[[tuple[tuple[str, int], ...]], None]) -> None:
        """No process of the member is left: call `done` with the streams that are not sent yet.

        Checkpoints and output files are at the head by then, or their time limits are over: the next attempt and the jobs that wait for
        this one use them. Lines of output are sent on after the end of the job, so that its devices are not held for them.
        One after the other, since each may still write a line to the job's log.
        """
        key, patient = member.key, member.ended_in_order

        def ship() -> None:
            keys = self._shipper.streams_of(key.job_id, key.epoch)
            later = self._outlives_members and not self._shutting_down()
            self._shipper.notify_when_uploaded(
                keys, SEND_AT_ONCE_S if later else SEND_LAST_S, lambda: done(self._shipper.unsent(keys))
            )

        def send() -> None:
            self.output_sync.notify_when_sent(member, ship, patient=patient)

        self.checkpoint_uploader.notify_when_uploaded(key.job_id, key.epoch, send, patient=patient)

    def when_output_is_sent(self, keys: Collection[str], done: Callable[[], None]) -> None:
        """Call `done` once the head has these streams, or never will."""
        self._shipper.notify_when_uploaded(keys, math.inf if self._outlives_members else SEND_LAST_S, done)

    def stop_attempt(self, job_id: JobId, epoch: Epoch) -> None:
        """The attempt is over for the head too: upload nothing more except log lines."""
        self.checkpoint_uploader.stop_attempt(job_id, epoch)
        self.output_sync.stop_attempt(job_id, epoch)

    def remove_departed_jobs(self, folders: Collection[str], members: Collection[MemberRuntime]) -> None:
        """Bound the local checkpoint copies of jobs that have left this node. Empty folder names are skipped."""
        for folder in filter(None, folders):
            live = {os.path.basename(one.checkpoints) for one in members}
            checkpoint_folders.remove_departed_jobs(checkpoints_root(folder), live)
