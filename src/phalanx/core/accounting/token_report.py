"""What the tokens of services cost, by service and project. Sums are integers; the GPU time adds up to that of the replicas. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.core.accounting.cost_report import Amount, priced
from phalanx.core.accounting.service_sharing import share_rows
from phalanx.core.work.services.service_use import COUNTS, BatchUse, ServiceUse, ServiceUseHour
from phalanx.core.work.usage.price_list import PriceBook
from phalanx.core.work.usage.usage_hour import UsageHour


@dataclass(slots=True, kw_only=True)
class TokenSum:
    """One project's use of one service, by requests or in batches.

    Attributes:
        used: GPU time while it had requests, or of the batches. `idle`: without any, which the owner of the service bears.
    """

    service: str
    project: str
    batch: bool = False
    requests: int = 0
    estimated: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    stream_ms: int = 0
    kv_token_ms: int = 0
    used: Amount
    idle: Amount

    def add_use(self, use: ServiceUse) -> None:
        """Add requests and tokens."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(use, name))

    def add_batch(self, use: BatchUse) -> None:
        """Add requests and tokens of a batch."""
        self.requests += use.requests
        self.prompt_tokens += use.prompt_tokens
        self.answer_tokens += use.answer_tokens

    def add(self, other: TokenSum) -> None:
        """Add another row."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.used.add(other.used)
        self.idle.add(other.idle)


def sum_tokens(hours: Iterable[tuple[UsageHour, ServiceUseHour]], book: PriceBook) -> list[TokenSum]:
    """The sums of these hours, by service and project, batches apart. `hours`: those of the ledger before they are shared out, with the use of services."""
    found: dict[tuple[str, str, bool], TokenSum] = {}

    def row_of(service: str, project: str, *, batch: bool = False) -> TokenSum:
        key = (service, project, batch)
        fresh = TokenSum(service=service, project=project, batch=batch, used=Amount(), idle=Amount())
        return found.setdefault(key, fresh)

    for hour, use in hours:
        for one in use.uses:
            row_of(one.service, one.project).add_use(one)
        for batch in use.batches:
            row_of(batch.service, batch.project, batch=True).add_batch(batch)
        for part in share_rows(hour, use):
            if part.service:
                row = row_of(part.service, part.payer.project, batch=part.batch)
                amount = priced(part.row, book.price(part.row.model, part.row.pool, int(hour.id)))
                (row.idle if part.payer.idle else row.used).add(amount)
    return [found[key] for key in sorted(found)]
