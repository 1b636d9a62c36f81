"""`phalanx report waste`: what counts, which rows come first, and what each form of the report says."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index, operator"

from phalanx.cli.report.past_waste import HABITS, waste_table
from phalanx.cli.terminal import Terminal
from phalanx.core.accounting.usage_report import UsageKey, sum_usage
from phalanx.core.accounting.usage_states import UsageState
from phalanx.core.work.usage.usage_hour import UsageHour, UsageRow
from phalanx.core.work.usage.waste_terms import WASTE_STATES, WasteKind
from phalanx.wire.api.usage import UsageReportView, UsageRowView, UsageTotalView

HOUR_US = 3_600_000_000
WIDE = Terminal(width=200, height=40, interactive=False, colour=False, blocks=True)
ROWS = {
    "1": {"computing": 90.0, "idle": 2.0},
    "2": {"hung": 6.0, "data_bound": 1.0},
    "3": {"computing": 500.0, "starting": 3.0},
    "": {"free": 10.0, "broken": 4.0},
}


def hour():
    rows = tuple(
        UsageRow(
            model="h100",
            pool="",
            project="gpt",
            user="ada",
            queue="default",
            job=name,
            amounts=tuple((state, "", int(hours * HOUR_US)) for state, hours in states.items()),
        )
        for name, states in ROWS.items()
    )
    return UsageHour(id="0", fleet=sum(amount for row in rows for _, _, amount in row.amounts), rows=rows)


def view(by="job", rows_max=10):
    found = sum_usage([hour()], UsageKey(by), rows_max=rows_max, first=frozenset(WASTE_STATES))
    as_hours = {state.value: found.total.by_state.get(state, 0) for state in UsageState}
    return UsageReportView(
        by=by,
        since_s=0.0,
        until_s=3600.0,
        rows=[
            UsageRowView(
                key=row.key,
                gpu_hours=row.total / HOUR_US,
                gpu_us=row.total,
                by_state={state: amount / HOUR_US for state, amount in row.by_state.items()},
                by_state_us=row.by_state,
                merged=row.merged,
            )
            for row in found.rows
        ],
        total=UsageTotalView(
            fleet_gpu_hours=found.fleet / HOUR_US,
            fleet_gpu_us=found.fleet,
            by_state={state: amount / HOUR_US for state, amount in as_hours.items()},
            by_state_us=as_hours,
        ),
    )


def test_the_worst_rows_come_first_and_rows_without_waste_are_left_out():
    table = waste_table(view())
    value = table.value
    assert [row["key"] for row in value["rows"]] == ["2", "", "1"]
    assert [row["waste_gpu_hours"] for row in value["rows"]] == [7.0, 4.0, 2.0]
    assert value["total"]["waste_gpu_us"] == sum(row["waste_gpu_us"] for row in value["rows"]) == 13 * HOUR_US
    assert [row["command"] for row in value["rows"]] == [
        "phalanx logs 2 --stacks",
        "phalanx waste --state broken",
        "phalanx usage 1",
    ]
    lines = table.lines(WIDE)
    assert lines[0].split() == [
        "JOB",
        "WASTED",
        "OF",
        "IDLE",
        "HUNG",
        "DATA-BOUND",
        "BROKEN",
        "TO",
        "MEND",
        "IT",
        "SEE",
    ]
    assert lines[-1].split() == ["total", "13.0", "616", "2.000", "6.000", "1.000", "4.000"]
    assert table.notes == ("1.000 GPU-hours of this were low, data-bound or communicating: some work was done in them",)


def test_a_large_job_that_wastes_nothing_does_not_push_out_a_small_one_that_does():
    rows = waste_table(view(rows_max=1)).value["rows"]
    assert [row["key"] for row in rows] == ["2", ""]
    assert rows[1]["merged"] == 3


def test_each_state_of_waste_has_advice_and_is_a_state_of_the_ledger():
    assert set(WASTE_STATES) == HABITS.keys()
    assert set(WASTE_STATES) <= {state.value for state in UsageState}
    assert {kind.value for kind in WasteKind} - {"crash_loop"} <= set(WASTE_STATES)


def test_no_waste_is_one_line():
    found = view()
    clean = UsageReportView(by="user", since_s=0.0, until_s=1.0, rows=[], total=found.total)
    assert waste_table(clean).lines(WIDE) == ["no GPU-hours were wasted"]
