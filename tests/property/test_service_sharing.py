"""The time of replicas, shared out: whatever was used, the sums are those of the ledger."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.accounting.service_sharing import share_out
from phalanx.core.accounting.token_report import sum_tokens
from phalanx.core.work.services.service_use import BatchUse, ReplicaUse, ServiceUse, ServiceUseHour
from phalanx.core.work.usage.price_list import PriceBook
from phalanx.core.work.usage.usage_hour import UsageHour, UsageRow

# mypy: disable-error-code="arg-type, var-annotated"

COUNTS = st.integers(0, 10**6)
AMOUNTS = st.integers(0, 8 * 1000 * 3_600_000)
ROWS = st.builds(
    UsageRow,
    model=st.sampled_from(["h100", "a100"]),
    pool=st.just(""),
    project=st.sampled_from(["own", "nlp"]),
    user=st.sampled_from(["ann", "bob"]),
    queue=st.just("q"),
    job=st.sampled_from(["", "1", "2", "3"]),
    amounts=st.lists(
        st.tuples(st.sampled_from(["busy", "idle"]), st.just(""), AMOUNTS), max_size=2, unique_by=lambda one: one[0]
    ).map(tuple),
    energy=st.lists(st.tuples(st.just("nvml"), AMOUNTS, AMOUNTS), max_size=1).map(tuple),
    throttled=st.lists(st.tuples(st.just("hot"), AMOUNTS), max_size=1).map(tuple),
)
USES = st.builds(
    ServiceUse,
    service=st.sampled_from(["chat", "code"]),
    project=st.sampled_from(["own", "nlp", "cv"]),
    user=st.sampled_from(["ann", "eve"]),
    requests=COUNTS,
    prompt_tokens=COUNTS,
    answer_tokens=COUNTS,
)
REPLICAS = st.lists(
    st.builds(
        ReplicaUse, service=st.sampled_from(["chat", "code"]), job=st.sampled_from(["1", "2", "9"]), busy=AMOUNTS
    ),
    max_size=3,
    unique_by=lambda one: one.job,
)


def totals(rows):
    """All sums of some rows that must not change."""
    found = Counter()
    for row in rows:
        for state, note, amount in row.amounts:
            found[row.model, row.job, state, note] += amount
        for source, energy, covered in row.energy:
            found[row.model, row.job, source, "energy"] += energy
            found[row.model, row.job, source, "covered"] += covered
        for cause, amount in row.throttled:
            found[row.model, row.job, cause, "throttled"] += amount
    return +found


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, max_size=5), st.lists(USES, max_size=4), REPLICAS)
def test_sums_are_those_of_the_ledger_and_no_part_is_negative(rows, uses, replicas):
    hour = UsageHour(id="7200", fleet=5, rows=tuple(rows), millijoules=9)
    use = ServiceUseHour(id="7200").plus(ServiceUseHour(id="7200", uses=tuple(uses), replicas=tuple(replicas)))
    shared = share_out(hour, use)
    assert totals(shared.rows) == totals(rows)
    assert (shared.fleet, shared.millijoules) == (5, 9)
    assert all(amount >= 0 for row in shared.rows for _, _, amount in row.amounts)
    served = {one.job for one in replicas}
    span = sum(amount for row in rows if row.job in served for _, _, amount in row.amounts)
    report = sum_tokens([(hour, use)], PriceBook(()))
    assert sum(one.used.gpu_us + one.idle.gpu_us for one in report) == span, "exactly the spans of the replicas"
    assert sum(one.prompt_tokens for one in report) == sum(one.prompt_tokens for one in uses)


def test_a_replica_that_was_busy_for_half_an_hour_is_borne_by_tokens_and_its_owner():
    row = UsageRow(
        model="h100", pool="", project="own", user="ann", queue="q", job="1", amounts=(("busy", "", 3_600_000_000),)
    )
    use = ServiceUseHour(
        id="0",
        uses=(
            ServiceUse(service="chat", project="nlp", user="bob", requests=1, prompt_tokens=100, answer_tokens=200),
            ServiceUse(service="chat", project="cv", user="eve", requests=9, prompt_tokens=100),
        ),
        replicas=(ReplicaUse(service="chat", job="1", busy=1_800_000_000),),
    )
    found = {
        (one.project, one.user): one.amounts[0][2]
        for one in share_out(UsageHour(id="0", fleet=3_600_000_000, rows=(row,)), use).rows
    }
    assert found == {("nlp", "bob"): 1_350_000_000, ("cv", "eve"): 450_000_000, ("own", "ann"): 1_800_000_000}


def test_a_batch_bears_its_whole_time_and_has_a_row_of_its_own():
    rows = tuple(
        UsageRow(model="h100", pool="", project="nlp", user="ann", queue="q", job=job, amounts=(("busy", "", 600),))
        for job in ("1", "9")
    )
    batch = BatchUse(service="chat", job="9", project="nlp", user="ann", requests=2, prompt_tokens=50, answer_tokens=7)
    use = ServiceUseHour(
        id="0",
        uses=(ServiceUse(service="chat", project="cv", user="eve", requests=1, prompt_tokens=100),),
        replicas=(ReplicaUse(service="chat", job="1", busy=300),),
    ).plus(ServiceUseHour(id="0", batches=(batch,)))
    # A report that came late, and the newest one twice: each has the whole of its hour.
    early = BatchUse(service="chat", job="9", project="nlp", user="ann", requests=1, prompt_tokens=20, answer_tokens=7)
    use = use.plus(ServiceUseHour(id="0", batches=(early,))).plus(ServiceUseHour(id="0", batches=(batch,)))
    hour = UsageHour(id="0", fleet=1200, rows=rows)
    shared = share_out(hour, use).rows
    assert totals(shared) == totals(rows)
    assert {(one.job, one.project): one.amounts[0][2] for one in shared} == {
        ("1", "cv"): 300,
        ("1", "nlp"): 300,
        ("9", "nlp"): 600,
    }
    found = {
        (one.project, one.batch): (one.requests, one.prompt_tokens, one.used.gpu_us, one.idle.gpu_us)
        for one in sum_tokens([(hour, use)], PriceBook(()))
    }
    assert found == {("cv", False): (1, 100, 300, 0), ("nlp", False): (0, 0, 0, 300), ("nlp", True): (2, 50, 600, 0)}
