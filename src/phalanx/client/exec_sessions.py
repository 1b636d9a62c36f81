"""API calls for commands that run next to a job's ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.client.api_calls import (
    ApiCalls,
    LazyModule,
    decode_record,
    path_segment,
    query_string,
)
from phalanx.client.transport import REPLY_TIMEOUT_S

if TYPE_CHECKING:
    from phalanx.wire.api import execs as api
else:
    api = LazyModule("phalanx.wire.api.execs")


class ExecApi(ApiCalls):
    """Start a command in a job, send it input and read its output."""

    def exec(
        self, job_id: str, argv: Sequence[str], *, tty: bool = False, rows: int = 24, cols: int = 80, node_rank: int = 0
    ) -> str:
        """Start a command next to a job's ranks; return the id of the session."""
        body = {"argv": list(argv), "tty": tty, "rows": rows, "cols": cols, "node_rank": node_rank}
        session: str = json.loads(self._post(f"/v1/jobs/{path_segment(job_id)}/exec", body))["session"]
        return session

    def exec_output(self, session: str, after: int, *, wait_s: float = 20.0) -> api.ExecOutputReply:
        """Return the output from byte `after` on; wait up to `wait_s` for it."""
        path = f"/v1/exec/{path_segment(session)}/output" + query_string({"after": after, "wait_s": wait_s})
        return decode_record(self.transport.json("GET", path, timeout_s=REPLY_TIMEOUT_S), api.ExecOutputReply)

    def exec_input(self, session: str, offset: int, data: bytes = b"", *, closed: bool = False) -> int:
        """Send input; return the offset up to which the head has accepted it."""
        import base64

        body = {"offset": offset, "data": base64.b64encode(data).decode(), "closed": closed}
        end: int = json.loads(self._post(f"/v1/exec/{path_segment(session)}/input", body, idempotent=True))["end"]
        return end

    def exec_resize(self, session: str, rows: int, cols: int) -> None:
        """Send the new size of the terminal."""
        self._post(f"/v1/exec/{path_segment(session)}/resize", {"rows": rows, "cols": cols}, idempotent=True)

    def exec_close(self, session: str) -> None:
        """Close the session."""
        self.transport.json("DELETE", f"/v1/exec/{path_segment(session)}")
