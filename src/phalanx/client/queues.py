"""API calls for queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.client.api_calls import (
    ApiCalls,
    LazyModule,
    decode_record,
    id_path_segment,
)

if TYPE_CHECKING:
    from phalanx.wire.api import queues as api
else:
    api = LazyModule("phalanx.wire.api.queues")


class QueuesApi(ApiCalls):
    """Read and change queues."""

    def queues(self) -> list[api.QueueView]:
        """Return all queues."""
        return [view for page in self._pages("/v1/queues", api.QueueList) for view in page.queues]

    def queue(self, queue_id: str) -> api.QueueView:
        """Return one queue."""
        return self._get(f"/v1/queues/{id_path_segment('queue', queue_id)}", api.QueueReply).queue

    def put_queues(
        self, queues: Sequence[api.QueueSettings], *, prune: bool = False, dry_run: bool = False
    ) -> api.QueuesApplied:
        """Create or change queues, all or none; `prune` removes the others. Return the changes; with `dry_run` apply none of them."""
        import msgspec

        body = {"queues": [msgspec.to_builtins(queue) for queue in queues], "prune": prune, "dry_run": dry_run}
        return decode_record(self._put("/v1/queues", body), api.QueuesApplied)

    def put_queue(self, queue_id: str, *, priority: int | None = None, open: bool | None = None) -> api.QueueView:  # noqa: A002
        """Create or change a queue."""
        return decode_record(
            self._put(f"/v1/queues/{id_path_segment('queue', queue_id)}", {"priority": priority, "open": open}),
            api.QueueReply,
        ).queue
