"""The metrics that a head exports at `GET /metrics`, declared once: the head fills them, and alert rules and boards name them.

The DCGM names, labels and units are those of NVIDIA dcgm-exporter (etc/default-counters.csv and the label set of its renderer), so that its
dashboards work. Only they have the job's id as a label: on others it would create one series per job ever run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_DEVICE_LABELS: Final = ("gpu", "UUID", "device", "modelName", "Hostname", "node", "virtual", "hpc_job")


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One family. A counter's samples end in `_total`; its name here does not. `sometimes`: absent where there is nothing to count."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    counter: bool = False
    sometimes: bool = False

    @property
    def sample(self) -> str:
        """The name in an expression."""
        return f"{self.name}_total" if self.counter else self.name


FAMILIES: Final = {
    family.name: family
    for family in (
        MetricFamily("phalanx_jobs", "Jobs by state.", ("state",)),
        MetricFamily("phalanx_jobs_waiting", "Pending jobs by their main reason.", ("reason",)),
        MetricFamily(
            "phalanx_longest_wait_seconds",
            "Time since the submit of the job that has waited longest for GPUs, a quota or its turn, by queue.",
            ("queue",),
        ),
        MetricFamily("phalanx_nodes", "Nodes by state.", ("state", "cordoned")),
        MetricFamily("phalanx_node_up", "1 for a node that is up, else 0.", ("node",)),
        MetricFamily(
            "phalanx_node_cordoned",
            "1 for a node that takes no new jobs. `by`: operator, or phalanx for a fault.",
            ("node", "by"),
        ),
        MetricFamily("phalanx_node_unhealthy_devices", "Devices of a node that are unhealthy.", ("node",)),
        MetricFamily("phalanx_node_sample_age_seconds", "Age of a node's newest device samples.", ("node",)),
        MetricFamily("phalanx_devices", "Devices by model.", ("model", "virtual")),
        MetricFamily(
            "phalanx_gpus", "GPUs by their state in the ledger now; parts of GPUs count in thousandths.", ("state",)
        ),
        MetricFamily("phalanx_waste_alarms", "Alarms of waste now, by kind.", ("kind",)),
        MetricFamily("phalanx_waste_alarm_gpus", "GPUs that alarms name now, by kind.", ("kind",)),
        MetricFamily(
            "phalanx_waste_alarms_begun",
            "Alarms of waste that began since the head started, by kind.",
            ("kind",),
            counter=True,
        ),
        MetricFamily("phalanx_head_info", "The running process of the head.", ("version", "head_id")),
        MetricFamily("phalanx_controller_stat", "Counters and timings of the controller's loop.", ("stat",)),
        MetricFamily("phalanx_leader", "1 on the leader; a standby answers 503.", sometimes=True),
        MetricFamily("phalanx_term", "Increases by one whenever another head takes over.", sometimes=True),
        MetricFamily(
            "phalanx_head_seen_age_seconds", "Time since a head last reported its presence.", ("head",), sometimes=True
        ),
        MetricFamily("phalanx_disk_free_bytes", "Free space of the disk with the head's files."),
        MetricFamily("phalanx_disk_bytes", "Size of the disk with the head's files."),
        MetricFamily("phalanx_submits", "Jobs submitted, each durable when it was answered.", counter=True),
        MetricFamily("phalanx_lease_renewals", "Renewals of supervisors' leases.", counter=True),
        MetricFamily("phalanx_events", "Events received from supervisors.", counter=True),
        MetricFamily("phalanx_stream_bytes", "Bytes of logs and step reports stored.", counter=True),
        MetricFamily(
            "phalanx_kept_bytes", "Bytes of outputs and checkpoints that nodes sent to the head.", counter=True
        ),
        MetricFamily("phalanx_refusals", "Requests that were refused.", counter=True),
        MetricFamily("phalanx_event_streams_open", "Event streams open now."),
        MetricFamily("phalanx_exec_sessions_open", "Exec sessions open now."),
        MetricFamily("phalanx_commands_waiting", "Commands that no supervisor has fetched."),
        MetricFamily("phalanx_history_bytes", "Space that the history of devices and jobs takes.", sometimes=True),
        MetricFamily(
            "phalanx_history_failing", "1 while history cannot be stored; jobs are not affected.", sometimes=True
        ),
        MetricFamily(
            "phalanx_history_lost_hours",
            "Hours of nodes dropped because history could not be stored.",
            sometimes=True,
        ),
        MetricFamily("phalanx_history_stored_age_seconds", "Time since history was last stored.", sometimes=True),
        MetricFamily(
            "phalanx_trace_spans_exported",
            "Spans of jobs that the collector of traces accepted.",
            counter=True,
            sometimes=True,
        ),
        MetricFamily(
            "phalanx_trace_jobs_dropped",
            "Ended jobs whose traces were given up, because the collector did not accept them.",
            counter=True,
            sometimes=True,
        ),
        MetricFamily("phalanx_trace_jobs_waiting", "Ended jobs whose traces wait for the collector.", sometimes=True),
        MetricFamily(
            "phalanx_trace_export_failing", "1 while the collector of traces accepts nothing.", sometimes=True
        ),
        MetricFamily("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", _DEVICE_LABELS),
        MetricFamily("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).", _DEVICE_LABELS),
        MetricFamily("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", _DEVICE_LABELS),
        MetricFamily("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", _DEVICE_LABELS),
        MetricFamily("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", _DEVICE_LABELS),
    )
}
"""By name."""
