"""Rules for Prometheus on the metrics of a head: recorded ratios, and alerts whose text names the command that tells more.

An alert stands for something that a person should look at. Waste has its own thresholds in the head, so its alerts start without a further wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.accounting.usage_states import UsageState
from phalanx.core.work.usage.waste_terms import WasteKind

_OF_NO_JOB: Final = (
    UsageState.FREE,
    UsageState.FREE_DEMAND,
    UsageState.FRAGMENTED,
    UsageState.RESERVED,
    UsageState.PROVISIONING,
    UsageState.BROKEN,
    UsageState.DRAINING,
)


@dataclass(frozen=True, slots=True)
class RecordedRatio:
    """A recorded series. Names follow Prometheus' level:metric:operation."""

    record: str
    expression: str


@dataclass(frozen=True, slots=True)
class AlertRule:
    """One alert. `lasts`: how long the expression must hold, in Prometheus' notation. `text` may use its templates."""

    name: str
    expression: str
    lasts: str
    severity: str
    summary: str
    text: str


_HELD: Final = "|".join(state.value for state in UsageState if state not in _OF_NO_JOB)
_WASTED: Final = "|".join(kind.value for kind in (WasteKind.IDLE, WasteKind.UNOCCUPIED))
RECORDED: Final = (
    RecordedRatio("phalanx:gpus:sum", "sum(phalanx_gpus)"),
    RecordedRatio("phalanx:gpus_held:ratio", f'sum(phalanx_gpus{{state=~"{_HELD}"}}) / sum(phalanx_gpus)'),
    RecordedRatio("phalanx:gpus_computing:ratio", 'sum(phalanx_gpus{state="computing"}) / sum(phalanx_gpus)'),
    RecordedRatio("node:phalanx_gpu_util:avg", "avg by (node) (DCGM_FI_DEV_GPU_UTIL)"),
    RecordedRatio("phalanx:power_watts:sum", "sum(DCGM_FI_DEV_POWER_USAGE)"),
)
ALERTS: Final = (
    AlertRule(
        "PhalanxNoHead",
        "absent(phalanx_head_info)",
        "1m",
        "critical",
        "No head of Phalanx answers",
        "Running jobs go on; nothing new starts. On the machine of the head: phalanx doctor",
    ),
    AlertRule(
        "PhalanxHeadSilent",
        "phalanx_head_seen_age_seconds > 60",
        "1m",
        "warning",
        "Head {{ $labels.head }} is silent",
        "A standby that is gone cannot take over. phalanx heads",
    ),
    AlertRule(
        "PhalanxNodeDown",
        "phalanx_node_up == 0",
        "1m",
        "critical",
        "Node {{ $labels.node }} is down",
        "Its jobs restart elsewhere where there is room. phalanx nodes show {{ $labels.node }}",
    ),
    AlertRule(
        "PhalanxNodeFaulty",
        'phalanx_node_cordoned{by="phalanx"} == 1',
        "0m",
        "warning",
        "Phalanx has taken node {{ $labels.node }} out of service",
        "The reason and the evidence: phalanx nodes show {{ $labels.node }}",
    ),
    AlertRule(
        "PhalanxDevicesUnhealthy",
        "phalanx_node_unhealthy_devices > 0",
        "0m",
        "warning",
        "{{ $value }} devices of node {{ $labels.node }} are unhealthy",
        "phalanx nodes show {{ $labels.node }}",
    ),
    AlertRule(
        "PhalanxNodeSendsNoSamples",
        "(phalanx_node_sample_age_seconds > 300) and on (node) (phalanx_node_up == 1)",
        "5m",
        "warning",
        "Node {{ $labels.node }} is up but sends no samples",
        "The use of its GPUs is unknown. The log of its supervisor says why; phalanx nodes show {{ $labels.node }}",
    ),
    AlertRule(
        "PhalanxGpusHeldForNothing",
        f'phalanx_waste_alarm_gpus{{kind=~"{_WASTED}"}} > 0',
        "0m",
        "warning",
        "{{ $value }} GPUs are held and do nothing",
        "Who holds them, and what mends it: phalanx waste",
    ),
    AlertRule(
        "PhalanxJobsHang",
        f'phalanx_waste_alarms{{kind="{WasteKind.HUNG.value}"}} > 0',
        "0m",
        "warning",
        "{{ $value }} jobs have stopped making steps",
        "phalanx waste",
    ),
    AlertRule(
        "PhalanxCrashLoop",
        f'phalanx_waste_alarms{{kind="{WasteKind.CRASH_LOOP.value}"}} > 0',
        "0m",
        "warning",
        "{{ $value }} jobs fail again and again",
        "phalanx waste",
    ),
    AlertRule(
        "PhalanxJobsWaitBesideFreeGpus",
        'sum(phalanx_gpus{state="free_demand"}) > 0',
        "30m",
        "warning",
        "{{ $value }} GPUs are free while jobs wait for GPUs",
        "A gang needs more at one place, or a quota is in the way. phalanx ps -s pending, then phalanx why JOB",
    ),
    AlertRule(
        "PhalanxJobsWaitLong",
        "phalanx_longest_wait_seconds > 86400",
        "5m",
        "info",
        "A job of queue {{ $labels.queue }} has waited for {{ $value | humanizeDuration }}",
        "phalanx why JOB; phalanx queues",
    ),
    AlertRule(
        "PhalanxGpuHot",
        "DCGM_FI_DEV_GPU_TEMP > 87",
        "5m",
        "warning",
        "GPU {{ $labels.gpu }} of node {{ $labels.node }} has {{ $value }} C",
        "A GPU that is too hot slows down; the reasons are in phalanx nodes history {{ $labels.node }}",
    ),
    AlertRule(
        "PhalanxDiskFills",
        "phalanx_disk_free_bytes / phalanx_disk_bytes < 0.1",
        "10m",
        "warning",
        "The disk of the head has {{ $value | humanizePercentage }} left",
        "phalanx clean --older-than 30d --dry-run shows what it would free",
    ),
    AlertRule(
        "PhalanxDiskFull",
        "phalanx_disk_free_bytes / phalanx_disk_bytes < 0.02",
        "1m",
        "critical",
        "The disk of the head has {{ $value | humanizePercentage }} left",
        "A head that cannot write accepts no jobs. phalanx clean --older-than 30d",
    ),
    AlertRule(
        "PhalanxHistoryFails",
        "phalanx_history_failing == 1",
        "10m",
        "warning",
        "The history of devices is not stored",
        "Jobs are not affected. The log of the head says why; phalanx doctor",
    ),
)


def rule_groups() -> dict[str, Any]:
    """The content of the rule file."""
    recorded = [{"record": one.record, "expr": one.expression} for one in RECORDED]
    alerts = [
        {
            "alert": one.name,
            "expr": one.expression,
            "for": one.lasts,
            "labels": {"severity": one.severity},
            "annotations": {"summary": one.summary, "description": one.text},
        }
        for one in ALERTS
    ]
    return {"groups": [{"name": "phalanx-recorded", "rules": recorded}, {"name": "phalanx-alerts", "rules": alerts}]}
