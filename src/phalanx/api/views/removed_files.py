"""Says that files of a job were removed by age, for users who look for them."""

from __future__ import annotations

import time
from typing import Final

from phalanx.controller.requests.retention import FILES_REMOVED
from phalanx.core.ids import JobId
from phalanx.core.work.retention import RetainedFiles
from phalanx.ports.store import Store

_PAGE: Final = 1000


def removal_note(store: Store, job_id: JobId, files: RetainedFiles) -> str:
    """When and why these files of a job were removed; "" if they were not."""
    note, after = "", 0
    while lines := store.history(job_id=job_id, after=after, limit=_PAGE):
        for line in lines:
            if line.kind == FILES_REMOVED and line.facts.get("files") == files:
                day = time.strftime("%Y-%m-%d", time.gmtime(line.at_s))
                note = f"The {files} of job {job_id} were removed on {day}: {line.text.split(': ', 1)[-1]}."
        if len(lines) < _PAGE:
            break
        after = lines[-1].seq
    return note
