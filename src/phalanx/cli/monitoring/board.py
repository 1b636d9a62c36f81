"""A board for Grafana 10 or newer on the metrics of a head, as its JSON model."""

from __future__ import annotations

from typing import Any, Final

from phalanx.core.accounting.usage_states import UsageState

_WIDTH: Final = 24  # columns of a board
_SCHEMA: Final = 39  # version of the JSON model: Grafana 10.4
_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
# Those of the dashboard of the head (web/static/phalanx.css), in light.
_COLOURS: Final = {
    UsageState.COMPUTING: "#2e9e62",
    UsageState.LOW: "#9fc46a",
    UsageState.DATA_BOUND: "#5aa7b8",
    UsageState.COMMUNICATING: "#3f7f92",
    UsageState.CHECKPOINTING: "#7f9fe0",
    UsageState.STARTING: "#a8cdb8",
    UsageState.IDLE: "#e5b94c",
    UsageState.UNOCCUPIED: "#e08f3f",
    UsageState.HUNG: "#a3402f",
    UsageState.LOST: "#8a2f4a",
    UsageState.PREEMPTED: "#cfa2d0",
    UsageState.RESERVED: "#a9b8e0",
    UsageState.PROVISIONING: "#c9d2dd",
    UsageState.BROKEN: "#d3483f",
    UsageState.DRAINING: "#d59a6a",
    UsageState.FRAGMENTED: "#c7b299",
    UsageState.FREE_DEMAND: "#8fb3d9",
    UsageState.FREE: "#e3e8ed",
}
# Title, kind, unit, columns, rows, then expressions with their legends.
_PANELS: Final[tuple[tuple[str, str, str, int, int, tuple[tuple[str, str], ...]], ...]] = (
    ("GPUs", "stat", "short", 4, 4, (("sum(phalanx_gpus)", "GPUs"),)),
    ("Computing", "stat", "percentunit", 4, 4, (('sum(phalanx_gpus{state="computing"}) / sum(phalanx_gpus)', ""),)),
    ("Jobs that run", "stat", "short", 4, 4, (('sum(phalanx_jobs{state="running"})', ""),)),
    ("Jobs that wait", "stat", "short", 4, 4, (('sum(phalanx_jobs{state="pending"})', ""),)),
    ("Nodes down", "stat", "short", 4, 4, (("count(phalanx_node_up == 0) or vector(0)", ""),)),
    ("GPUs held for nothing", "stat", "short", 4, 4, (("sum(phalanx_waste_alarm_gpus)", ""),)),
    ("GPUs by state", "stacked", "short", 24, 9, (("sum by (state) (phalanx_gpus) > 0", "{{state}}"),)),
    ("Why jobs wait", "stacked", "short", 12, 8, (("sum by (reason) (phalanx_jobs_waiting)", "{{reason}}"),)),
    ("Longest wait by queue", "lines", "s", 12, 8, (("phalanx_longest_wait_seconds", "{{queue}}"),)),
    ("Utilization by node", "heat", "percent", 12, 8, (("avg by (node) (DCGM_FI_DEV_GPU_UTIL)", "{{node}}"),)),
    ("Power", "lines", "watt", 12, 8, (("sum by (modelName) (DCGM_FI_DEV_POWER_USAGE)", "{{modelName}}"),)),
    ("Hottest GPUs", "lines", "celsius", 12, 8, (("topk(10, DCGM_FI_DEV_GPU_TEMP)", "{{node}} {{gpu}}"),)),
    ("Alarms of waste", "lines", "short", 12, 8, (("sum by (kind) (phalanx_waste_alarms) > 0", "{{kind}}"),)),
    (
        "Requests of the head",
        "lines",
        "reqps",
        12,
        8,
        (
            ("rate(phalanx_submits_total[5m])", "submits"),
            ("rate(phalanx_events_total[5m])", "events"),
            ("rate(phalanx_lease_renewals_total[5m])", "lease renewals"),
            ("rate(phalanx_refusals_total[5m])", "refused"),
        ),
    ),
    ("Free space of the head", "lines", "bytes", 12, 8, (("phalanx_disk_free_bytes", "free"),)),
)
_GRAFANA_KINDS: Final = {"stat": "stat", "lines": "timeseries", "stacked": "timeseries", "heat": "status-history"}


def board() -> dict[str, Any]:
    """The board; it asks for its data source when it is imported."""
    panels: list[dict[str, Any]] = []
    x = y = tallest = 0
    for number, (title, kind, unit, width, height, targets) in enumerate(_PANELS, start=1):
        if x + width > _WIDTH:
            x, y, tallest = 0, y + tallest, 0
        panels.append(
            {
                "id": number,
                "title": title,
                "type": _GRAFANA_KINDS[kind],
                "datasource": _SOURCE,
                "gridPos": {"x": x, "y": y, "w": width, "h": height},
                "fieldConfig": {
                    "defaults": _defaults(kind, unit),
                    "overrides": _overrides() if "state" in title else [],
                },
                "targets": [
                    {"refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend, "datasource": _SOURCE}
                    for at, (expression, legend) in enumerate(targets)
                ],
            }
        )
        x, tallest = x + width, max(tallest, height)
    return {
        "uid": "phalanx-fleet",
        "title": "Phalanx: fleet",
        "tags": ["phalanx"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }


def _defaults(kind: str, unit: str) -> dict[str, Any]:
    found: dict[str, Any] = {"unit": unit, "min": 0}
    if kind in {"lines", "stacked"}:
        stacked = kind == "stacked"
        found["custom"] = {
            "lineWidth": 0 if stacked else 1,
            "fillOpacity": 80 if stacked else 10,
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        }
    if kind == "heat":
        found |= {"max": 100, "color": {"mode": "continuous-BlPu"}}
    return found


def _overrides() -> list[dict[str, Any]]:
    return [
        {
            "matcher": {"id": "byName", "options": state.value},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
        }
        for state, colour in _COLOURS.items()
    ]
