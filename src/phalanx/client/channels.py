"""API calls for notification channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.client.api_calls import ApiCalls, LazyModule, decode_record, id_path_segment

if TYPE_CHECKING:
    from phalanx.wire.api import channels as api
else:
    api = LazyModule("phalanx.wire.api.channels")


class ChannelsApi(ApiCalls):
    """Add, list, test and remove notification channels."""

    def channels(self) -> list[api.ChannelView]:
        """Return all channels, by name."""
        return self._get("/v1/channels", api.ChannelList).channels

    def put_channel(
        self, name: str, url: str, *, project: str = "", topics: Sequence[str] = ()
    ) -> list[api.ChannelView]:
        """Add a channel, or replace one; return all."""
        body = {"url": url, "project": project, "topics": list(topics)}
        return decode_record(
            self._put(f"/v1/channels/{id_path_segment('channel', name)}", body), api.ChannelList
        ).channels

    def remove_channel(self, name: str) -> None:
        """Remove a channel."""
        self.transport.json("DELETE", f"/v1/channels/{id_path_segment('channel', name)}")

    def test_channel(self, name: str) -> None:
        """Send a test message; raises TryLater if the service does not accept it."""
        self._post(f"/v1/channels/{id_path_segment('channel', name)}/test", None)
