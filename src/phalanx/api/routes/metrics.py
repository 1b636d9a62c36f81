"""GET /metrics for Prometheus: `phalanx_*`, and device samples under the names of dcgm-exporter, so that existing dashboards work.

Source of the DCGM names, labels and units: NVIDIA dcgm-exporter, etc/default-counters.csv and the label set of its renderer
(gpu, UUID, device, modelName, Hostname; `hpc_job` for the job): utilisation in percent, frame buffer in MiB, power in W, temperature in C.
Only these node metrics have the job's id as a label: on others it would create one series per job ever run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.runtime import ApiRuntime, run_in_thread, runtime_of
from phalanx.api.services import LeaderStatus
from phalanx.controller.telemetry import silence_s
from phalanx.controller.waste_monitor import WasteNow
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node
from phalanx.core.resources import MILLI_PER_DEVICE
from phalanx.core.units import MIB
from phalanx.core.work.job import JobState
from phalanx.core.work.users import Action
from phalanx.core.work.waste_terms import WasteKind
from phalanx.wire.supervisor import DeviceSample, SamplesRequest

_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_STALE_S: Final = 30.0  # older samples are left out
_LABELS: Final = ("gpu", "UUID", "device", "modelName", "Hostname", "node", "virtual", "hpc_job")
_DCGM: Final = {
    "DCGM_FI_DEV_GPU_UTIL": "GPU utilization (in %).",
    "DCGM_FI_DEV_FB_USED": "Framebuffer memory used (in MiB).",
    "DCGM_FI_DEV_FB_FREE": "Framebuffer memory free (in MiB).",
    "DCGM_FI_DEV_POWER_USAGE": "Power draw (in W).",
    "DCGM_FI_DEV_GPU_TEMP": "GPU temperature (in C).",
}

routes = RouteTable()


@routes.get("/metrics", Action.VIEW, reply=MediaType.TEXT)
async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus' text format."""
    return Response(await run_in_thread(render_metrics, runtime_of(request)), media_type=_TYPE)


def render_metrics(runtime: ApiRuntime) -> bytes:
    """Return all metrics as text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Head(runtime))
    return generate_latest(registry)


class _Head(Collector):
    """Reads all values at each scrape; nothing is stored here."""

    def __init__(self, runtime: ApiRuntime) -> None:
        self._runtime = runtime

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics are known only when `collect` runs."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        nodes = self._runtime.services.store.nodes()
        yield from self._jobs()
        yield from _fleet(nodes)
        yield from self._loop()
        yield from _waste(self._runtime.services.waste())
        yield from self._history()
        yield from self._devices(nodes)

    def _jobs(self) -> Iterator[Metric]:
        counts = self._runtime.services.store.job_counts()
        jobs = GaugeMetricFamily("phalanx_jobs", "Jobs by state.", labels=["state"])
        for state in JobState:
            jobs.add_metric([state.value], counts.get(state, 0))
        yield jobs
        waiting = Counter(wait.reason.value for wait in self._runtime.services.controller.wait_reasons.values())
        reasons = GaugeMetricFamily("phalanx_jobs_waiting", "Pending jobs by their main reason.", labels=["reason"])
        for reason, count in sorted(waiting.items()):
            reasons.add_metric([reason], count)
        yield reasons

    def _loop(self) -> Iterator[Metric]:
        runtime = self._runtime
        info = GaugeMetricFamily("phalanx_head_info", "The running process of the head.", labels=["version", "head_id"])
        info.add_metric([runtime.services.version, runtime.services.controller.head_id], 1)
        yield info
        loop = GaugeMetricFamily(
            "phalanx_controller_stat", "Counters and timings of the controller's loop.", labels=["stat"]
        )
        for name, value in sorted(dict(runtime.services.controller.stats).items()):
            loop.add_metric([name], value)
        yield loop
        if runtime.services.leader_status is not None:
            yield from _leading(runtime.services.leader_status)
        for name, value in sorted(runtime.counts.items()):
            family = CounterMetricFamily(
                f"phalanx_{name}", _COUNTED.get(name, "Counted by the API since the head started.")
            )
            family.add_metric([], value)
            yield family
        for name, text, gauge in (
            ("phalanx_event_streams_open", "Event streams open now.", runtime.streams_open),
            ("phalanx_exec_sessions_open", "Exec sessions open now.", runtime.sessions.count()),
            (
                "phalanx_commands_waiting",
                "Commands that no supervisor has fetched.",
                sum(runtime.services.mailboxes.waiting().values()),
            ),
        ):
            family_open = GaugeMetricFamily(name, text)
            family_open.add_metric([], gauge)
            yield family_open

    def _history(self) -> Iterator[Metric]:
        services = self._runtime.services
        if services.history is None:
            return
        found = services.history.health()
        for name, text, value in (
            ("phalanx_history_bytes", "Space that the history of devices and jobs takes.", found.size_bytes),
            (
                "phalanx_history_failing",
                "1 while history cannot be stored; jobs are not affected.",
                bool(found.problem),
            ),
            ("phalanx_history_lost_hours", "Hours of nodes dropped because history could not be stored.", found.lost),
            (
                "phalanx_history_stored_age_seconds",
                "Time since history was last stored.",
                max(0.0, services.clock.now_s() - found.stored_s),
            ),
        ):
            family = GaugeMetricFamily(name, text)
            family.add_metric([], value)
            yield family

    def _devices(self, nodes: list[Node]) -> Iterator[Metric]:
        families = {name: GaugeMetricFamily(name, text, labels=_LABELS) for name, text in _DCGM.items()}
        now_s = self._runtime.services.clock.now_s()
        for node in nodes:
            samples = self._runtime.services.telemetry.node_samples(node.id)
            if samples is None or now_s - samples.at_s > max(_STALE_S, silence_s(samples)):
                continue
            models = {device.index: device for device in node.devices}
            for sample in samples.devices:
                labels = _labels(node, models.get(sample.index), sample)
                for name, value in _readings(sample):
                    families[name].add_metric(labels, value)
        yield from families.values()
        yield _ages(nodes, [self._runtime.services.telemetry.node_samples(node.id) for node in nodes], now_s)


_COUNTED: Final = {
    "submits": "Jobs submitted, each durable when it was answered.",
    "lease_renewals": "Renewals of supervisors' leases.",
    "events": "Events received from supervisors.",
    "stream_bytes": "Bytes of logs and step reports stored.",
}


def _waste(found: WasteNow) -> Iterator[Metric]:
    """Every kind has a series, also without alarms, so that rules on them can be written."""
    alarmed = [spell for spell in found.spells if spell.alarmed]
    count = GaugeMetricFamily("phalanx_waste_alarms", "Alarms of waste now, by kind.", labels=["kind"])
    gpus = GaugeMetricFamily("phalanx_waste_alarm_gpus", "GPUs that alarms name now, by kind.", labels=["kind"])
    begun = CounterMetricFamily(
        "phalanx_waste_alarms_begun", "Alarms of waste that began since the head started, by kind.", labels=["kind"]
    )
    for kind in WasteKind:
        of_kind = [spell.newest.milli for spell in alarmed if spell.newest.kind is kind]
        count.add_metric([kind.value], len(of_kind))
        gpus.add_metric([kind.value], sum(of_kind) / MILLI_PER_DEVICE)
        begun.add_metric([kind.value], found.begun.get(kind.value, 0))
    yield from (count, gpus, begun)


def _leading(among: LeaderStatus) -> Iterator[Metric]:
    leads = GaugeMetricFamily("phalanx_leader", "1 on the leader; a standby answers 503.")
    leads.add_metric([], 1 if among.leads() else 0)
    yield leads
    term = GaugeMetricFamily("phalanx_term", "Increases by one whenever another head takes over.")
    term.add_metric([], among.term)
    yield term
    heads = GaugeMetricFamily(
        "phalanx_head_seen_age_seconds", "Time since a head last reported its presence.", labels=["head"]
    )
    for head in among.heads():
        heads.add_metric([head.name], head.seen_ago_s)
    yield heads


def _fleet(nodes: list[Node]) -> Iterator[Metric]:
    states = Counter((node.state.value, "yes" if node.cordon is not None else "no") for node in nodes)
    family = GaugeMetricFamily("phalanx_nodes", "Nodes by state.", labels=["state", "cordoned"])
    for (state, cordoned), count in sorted(states.items()):
        family.add_metric([state, cordoned], count)
    yield family
    devices = Counter((device.model, str(device.virtual).lower()) for node in nodes for device in node.devices)
    kinds = GaugeMetricFamily("phalanx_devices", "Devices by model.", labels=["model", "virtual"])
    for (model, virtual), count in sorted(devices.items()):
        kinds.add_metric([model, virtual], count)
    yield kinds


def _ages(nodes: list[Node], samples: list[SamplesRequest | None], now_s: float) -> Metric:
    family = GaugeMetricFamily(
        "phalanx_node_sample_age_seconds", "Age of a node's newest device samples.", labels=["node"]
    )
    for node, sample in zip(nodes, samples, strict=True):
        if sample is not None:
            family.add_metric([node.id], max(0.0, now_s - sample.at_s))
    return family


def _labels(node: Node, device: Device | None, sample: DeviceSample) -> list[str]:
    return [
        str(sample.index),
        sample.uuid,
        f"{'virtual' if sample.virtual else 'nvidia'}{sample.index}",
        device.model if device is not None else "",
        node.hostname or node.id,
        node.id,
        str(sample.virtual).lower(),
        sample.job_id or "",
    ]


def _readings(sample: DeviceSample) -> Iterator[tuple[str, float]]:
    if sample.utilization is not None:
        yield "DCGM_FI_DEV_GPU_UTIL", round(100 * sample.utilization, 1)
    if sample.memory_used_bytes is not None:
        yield "DCGM_FI_DEV_FB_USED", sample.memory_used_bytes / MIB
        if sample.memory_total_bytes is not None:
            yield "DCGM_FI_DEV_FB_FREE", (sample.memory_total_bytes - sample.memory_used_bytes) / MIB
    if sample.power_w is not None:
        yield "DCGM_FI_DEV_POWER_USAGE", sample.power_w
    if sample.temperature_c is not None:
        yield "DCGM_FI_DEV_GPU_TEMP", sample.temperature_c
