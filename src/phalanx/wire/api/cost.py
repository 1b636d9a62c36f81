"""Records of the reports of cost. Amounts of money are decimal numbers as text, and integers in hundredths of the currency."""

from __future__ import annotations

import msgspec


class UnpricedView(msgspec.Struct, frozen=True, kw_only=True):
    """GPU time without a price: it costs nothing in the report."""

    pool: str
    gpu: str
    gpu_hours: float


class CostRowView(msgspec.Struct, frozen=True, kw_only=True):
    """What one project, user, queue, GPU model, pool or job costs.

    Attributes:
        key: "" for what belongs to none, such as idle GPUs that are not shared.
        gpu_hours: held by its jobs.
        idle_gpu_hours: its part of GPUs that no job held.
        used, idle, cost: of both, and their sum.
        unpriced_gpu_hours: the part of the time that has no price.
        merged: number of rows that are added up in this one; 0 for a row of its own.
    """

    key: str
    gpu_hours: float
    idle_gpu_hours: float
    used: str
    idle: str
    cost: str
    cost_cents: int
    unpriced_gpu_hours: float = 0.0
    merged: int = 0


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """A project's spending in the month (UTC).

    Attributes:
        budget: as "5000 EUR/month"; empty without one.
        percent: of the budget that is spent, rounded down; None without a budget in the currency of the prices.
        forecast: what the month will cost; `method` says how the rest of it was estimated.
    """

    project: str
    month: str
    currency: str
    spent: str
    spent_cents: int
    forecast: str
    forecast_cents: int
    method: str
    budget: str = ""
    percent: int | None = None


class CostReportView(msgspec.Struct, frozen=True, kw_only=True):
    """A report of cost; its rows add up to the total, and the total is that of the invoice of the same period.

    Attributes:
        currency: empty without prices.
        share_idle: the rule that spreads idle GPUs.
        total: all rows.
        unpriced: GPU time without a price.
        budgets: of projects with a budget, in a report by project.
    """

    by: str
    since_s: float
    until_s: float
    currency: str
    share_idle: str
    rows: list[CostRowView]
    total: CostRowView
    unpriced: list[UnpricedView] = []
    budgets: list[BudgetView] = []


class InvoiceLineView(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the invoice: all time of one GPU model in one pool ("" for none) in one month, rounded once.

    Attributes:
        gpu_us: the time in GPU-microseconds, as an integer.
        idle_gpu_hours: the part of the time in which no job held the GPUs.
        prices: for a GPU-hour, in the order in which they held.
    """

    month: str
    pool: str
    gpu: str
    gpu_hours: float
    gpu_us: int
    prices: list[str]
    cost: str
    cost_cents: int
    idle_gpu_hours: float = 0.0


class InvoiceView(msgspec.Struct, frozen=True, kw_only=True):
    """The invoice of a period, by month, pool and GPU model."""

    since_s: float
    until_s: float
    currency: str
    lines: list[InvoiceLineView]
    cost: str
    cost_cents: int
    unpriced: list[UnpricedView] = []


class FailureRowView(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of one cause, node, user, project, queue or job.

    Attributes:
        failures: failed attempts, each restart in place counted.
        jobs: distinct jobs.
        held_gpu_hours: what the failed attempts held.
        lost_gpu_hours: of it, work that is not part of the result.
        cost: of the lost hours, at the mean price of the job's GPU time; an estimate.
        merged: as in the other reports.
    """

    key: str
    failures: int
    jobs: int
    held_gpu_hours: float
    lost_gpu_hours: float
    cost: str
    cost_cents: int
    merged: int = 0


class FailuresReportView(msgspec.Struct, frozen=True, kw_only=True):
    """A report of failures. `unread_jobs`: older failed jobs of the period that are past the limit and not in it."""

    by: str
    since_s: float
    until_s: float
    currency: str
    rows: list[FailureRowView]
    total: FailureRowView
    unread_jobs: int = 0


class TokenRowView(msgspec.Struct, frozen=True, kw_only=True):
    """One project's use of one service.

    Attributes:
        batch: by batches, which have engines of their own; else by requests to its replicas.
        estimated: requests whose prompts were estimated, since the engine did not say.
        stream_s: the sum of the times that requests were at replicas; `kv_token_s`: tokens in the KV cache times seconds, an estimate.
        gpu_hours, gpu_us: of replicas while they had requests, by the project's part of the tokens; of batches all.
        idle_gpu_hours, idle_gpu_us: of replicas without requests; the owner of the service bears it.
        cost: of both; `cost_per_1k_tokens`: of the time with requests. Empty without prices.
    """

    service: str
    project: str
    batch: bool = False
    requests: int = 0
    estimated: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    stream_s: float = 0.0
    kv_token_s: float = 0.0
    gpu_hours: float = 0.0
    gpu_us: int = 0
    idle_gpu_hours: float = 0.0
    idle_gpu_us: int = 0
    cost: str = ""
    cost_per_1k_tokens: str = ""


class TokenReportView(msgspec.Struct, frozen=True, kw_only=True):
    """The use of services in a period. The GPU time of all rows is that of the replicas and batches. `total`: all rows, of which `merged` are not shown."""

    since_s: float
    until_s: float
    currency: str
    rows: list[TokenRowView]
    total: TokenRowView
    merged: int = 0
