"""API calls for the files and archives of ended jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.client.api_calls import ApiCalls, LazyModule, decode_record, path_segment, query_string

if TYPE_CHECKING:
    from phalanx.wire.api import retention as api
else:
    api = LazyModule("phalanx.wire.api.retention")


class RetentionApi(ApiCalls):
    """Set how long files of ended jobs are kept, remove old ones, and list archived jobs; `job` and `history` also show these."""

    def retention(self) -> api.RetentionView:
        """Return the periods, and the newest run that removes files."""
        return self._get("/v1/retention", api.RetentionView)

    def put_retention(self, periods_s: Mapping[str, float]) -> api.RetentionView:
        """Replace the periods (seconds after the end of a job, by kind of files)."""
        return decode_record(self._put("/v1/retention", {"periods_s": dict(periods_s)}), api.RetentionView)

    def start_retention_run(
        self, older_than_s: float, *, kinds: Sequence[str] = (), dry_run: bool = False
    ) -> api.RetentionRun:
        """Start to remove files of jobs that ended long ago; with `dry_run` only count them. `retention` has the progress."""
        body = {"older_than_s": older_than_s, "kinds": list(kinds), "dry_run": dry_run}
        return decode_record(self._post("/v1/retention/runs", body), api.RetentionRun)

    def archives(self) -> api.ArchiveList:
        """Return the months that have archives."""
        return self._get("/v1/archives", api.ArchiveList)

    def archived_jobs(
        self, month: str, *, user: str = "", after: int = 0, limit: int = 1000, stored: bool = False
    ) -> api.ArchivedJobs:
        """Return a page of the jobs of a month, such as 2026-08; with `stored` only those with files in object stores."""
        asked = query_string(
            {"user": user or None, "after": after, "limit": limit, "stored": "true" if stored else None}
        )
        return self._get(f"/v1/archives/{path_segment(month)}{asked}", api.ArchivedJobs)
