"""API calls for prices, reports of cost, invoices and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx.client.api_calls import ApiCalls, LazyModule, decode_record, grouping, path_segment, query_string

if TYPE_CHECKING:
    from phalanx.wire.api import cost as api
    from phalanx.wire.api import prices as prices_api
else:
    api = LazyModule("phalanx.wire.api.cost")
    prices_api = LazyModule("phalanx.wire.api.prices")


class CostApi(ApiCalls):
    """Set prices, and report what GPUs cost."""

    def prices(self) -> prices_api.PricesReply:
        """Return all prices of GPUs."""
        return self._get("/v1/prices", prices_api.PricesReply)

    def put_prices(
        self,
        currency: str,
        prices: Sequence[Mapping[str, str]],
        electricity: Sequence[Mapping[str, str]] | None = None,
        *,
        dry_run: bool = False,
    ) -> prices_api.PricesChanged:
        """Replace all prices, and the rates of electricity unless they are None; with `dry_run` only return what would change.

        Each has the keys of a price file.
        """
        body = {
            "currency": currency,
            "prices": [dict(price) for price in prices],
            "dry_run": dry_run,
            "electricity": None if electricity is None else [dict(rate) for rate in electricity],
        }
        return decode_record(self._put("/v1/prices", body), prices_api.PricesChanged)

    def cost_report(
        self, *, by: str, since_s: float, until_s: float | None = None, share_idle: str = "none", limit: int = 1000
    ) -> api.CostReportView:
        """Return the cost of the GPUs in the hours of a period, with a row for each project, user, queue, gpu, pool, job, or value of a `label:NAME`."""
        query = {**grouping(by), "since_s": since_s, "until_s": until_s, "share_idle": share_idle, "limit": limit}
        return self._get("/v1/cost" + query_string(query), api.CostReportView)

    def token_report(self, *, since_s: float, until_s: float | None = None) -> api.TokenReportView:
        """Return the use of services in a period, by service and project, and what their tokens cost."""
        query = query_string({"since_s": since_s, "until_s": until_s})
        return self._get("/v1/token-usage" + query, api.TokenReportView)

    def invoice(self, *, since_s: float, until_s: float | None = None) -> api.InvoiceView:
        """Return the invoice of a period, by month, pool and GPU model."""
        return self._get("/v1/invoice" + query_string({"since_s": since_s, "until_s": until_s}), api.InvoiceView)

    def spending(self, project: str) -> api.BudgetView:
        """Return what a project has spent this month, and its forecast."""
        return self._get(f"/v1/projects/{path_segment(project)}/spending", api.BudgetView)

    def failures_report(
        self, *, by: str, since_s: float, until_s: float | None = None, limit: int = 1000
    ) -> api.FailuresReportView:
        """Return the failures of a period, with a row for each cause, node, user, project, queue or job."""
        query = {"by": by, "since_s": since_s, "until_s": until_s, "limit": limit}
        return self._get("/v1/failures" + query_string(query), api.FailuresReportView)
