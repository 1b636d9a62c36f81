"""The operations of the description, and who may do them: what all generators begin with."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from tests.hostile.asked import NOBODY
from tests.hostile.good import Good, good_requests
from tests.hostile.head import ADMIN, SUPERVISING

EVERYBODY = (ADMIN, "operator", "user", "other", "viewer", SUPERVISING, NOBODY)
OF_OPERATION = {
    "make_token": ADMIN,
    "put_project": ADMIN,
    "revoke_token": ADMIN,
    "submit_service": "user",
    "stop_service": "user",
}
OF_ACTION = {"supervise": SUPERVISING, "administer": ADMIN, "operate": ADMIN, "join": SUPERVISING}
STREAMS = ("job_events", "all_events")
MINE = 0.8  # of requests come from who may do it: the others end at the gate


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path. `path` has its names in braces."""

    id: str
    method: str
    path: str
    action: str
    body_type: str
    good: Good

    def target(self, names: Mapping[str, str], query: Mapping[str, Any]) -> str:
        """Path and query with these names and values."""
        path = re.sub(r"{(\w+)}", lambda found: quote(names[found[1]], safe="", errors="surrogatepass"), self.path)
        return path + ("?" + urlencode(query, doseq=True, errors="surrogatepass") if query else "")

    def waits(self, query: Mapping[str, Any]) -> bool:
        """Whether it may hang or stream by right."""
        if self.id in STREAMS:
            return True
        return ("wait_s" in query and str(query["wait_s"]) not in ("0", "0.0")) or "follow" in query

    def role(self, rng: random.Random) -> str:
        """Somebody; mostly who may. Nobody whose stop would be obeyed."""
        if self.id == "stop_head":
            return rng.choice(("user", "viewer", SUPERVISING, NOBODY))
        return self.owner(rng) if rng.random() < MINE else rng.choice(EVERYBODY)

    def owner(self, rng: random.Random) -> str:
        """Somebody who may do it."""
        return OF_OPERATION.get(self.id) or OF_ACTION.get(self.action) or rng.choice(("user", ADMIN))


def operations(description: Mapping[str, Any], job_id: str, epoch: int) -> list[Operation]:
    """All of the description, in its order."""
    good = good_requests(job_id, epoch)
    return [
        Operation(
            id=told["operationId"],
            method=method.upper(),
            path=path,
            action=told["x-phalanx-action"],
            body_type=next(iter(told.get("requestBody", {}).get("content", {})), ""),
            good=good.get(told["operationId"], Good()),
        )
        for path, methods in description["paths"].items()
        for method, told in methods.items()
    ]
