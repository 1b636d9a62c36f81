"""GET /metrics for Prometheus. The families are declared in wire.metrics; all values are read at each scrape, nothing is stored here."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.runtime import ApiRuntime, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.controller.telemetry import silence_s
from phalanx.core.accounting.usage_states import UsageState
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.fitness import AUTOMATIC_CORDON_AUTHORS, FULL_DISK
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.resources import MILLI_PER_DEVICE
from phalanx.core.units import MIB
from phalanx.core.work.states import JobState, WaitReasonCode
from phalanx.core.work.usage.waste_terms import WasteKind
from phalanx.core.work.users import Action
from phalanx.wire.metrics import FAMILIES
from phalanx.wire.supervisor import DeviceSample

_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_STALE_S: Final = 30.0  # older samples are left out
_CAPACITY_WAITS: Final = frozenset(
    {WaitReasonCode.RESOURCES, WaitReasonCode.PRIORITY, WaitReasonCode.QUOTA, WaitReasonCode.NODES_DOWN}
)
"""Reasons for which a job waits for the fleet and not for its owner, another job or a date."""

routes = RouteTable()
Values = Iterable[tuple[tuple[str, ...], float]]


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
    """One scrape."""

    def __init__(self, runtime: ApiRuntime) -> None:
        self._runtime = runtime

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the metrics are known only when `collect` runs."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        services = self._runtime.services
        nodes = services.store.nodes()
        yield from _jobs(services)
        yield from _fleet(services, nodes)
        yield from _waste(services)
        yield from _head(self._runtime)
        yield from _history(services)
        yield from _traces(self._runtime)
        yield from _devices(services, nodes)


def _family(name: str, values: Values) -> Metric:
    """One declared family with its values by the values of its labels."""
    declared = FAMILIES[name]
    made = CounterMetricFamily if declared.counter else GaugeMetricFamily
    family = made(name, declared.text, labels=declared.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _single(name: str, value: float) -> Metric:
    return _family(name, [((), value)])


def _jobs(services: HeadServices) -> Iterator[Metric]:
    counts, waits = services.store.job_counts(), services.controller.wait_reasons
    yield _family("phalanx_jobs", (((state.value,), counts.get(state, 0)) for state in JobState))
    reasons = Counter(wait.reason.value for wait in waits.values())
    yield _family("phalanx_jobs_waiting", (((reason,), count) for reason, count in sorted(reasons.items())))
    since = {queue.id: (now_s := services.clock.now_s()) for queue in services.store.queues()}
    for job in services.controller.pending_jobs():
        wait = waits.get(job.id)
        if wait is not None and wait.reason in _CAPACITY_WAITS:
            since[job.queue] = min(since.get(job.queue, job.submit_s), job.submit_s)
    yield _family(
        "phalanx_longest_wait_seconds", (((queue,), max(0.0, now_s - at_s)) for queue, at_s in sorted(since.items()))
    )


def _fleet(services: HeadServices, nodes: list[Node]) -> Iterator[Metric]:
    states = Counter((node.state.value, "yes" if node.cordon is not None else "no") for node in nodes)
    yield _family("phalanx_nodes", sorted(states.items()))
    yield _family("phalanx_node_up", (((node.id,), node.state is not NodeState.DOWN) for node in nodes))
    automatic = (*AUTOMATIC_CORDON_AUTHORS, FULL_DISK)
    yield _family(
        "phalanx_node_cordoned",
        (
            ((node.id, "phalanx" if node.cordon.by in automatic else "operator"), 1)
            for node in nodes
            if node.cordon is not None
        ),
    )
    yield _family(
        "phalanx_node_unhealthy_devices",
        (((node.id,), sum(not device.healthy for device in node.devices)) for node in nodes),
    )
    devices = Counter((device.model, str(device.virtual).lower()) for node in nodes for device in node.devices)
    yield _family("phalanx_devices", sorted(devices.items()))
    totals = services.state_totals()
    yield _family("phalanx_gpus", (((state.value,), totals.get(state, 0) / MILLI_PER_DEVICE) for state in UsageState))


def _waste(services: HeadServices) -> Iterator[Metric]:
    """Every kind has a series, also without alarms, so that rules on them can be written."""
    found = services.waste()
    alarms = [(spell.newest.kind, spell.newest.milli) for spell in found.spells if spell.alarmed]
    of_kind = {kind: [milli for alarmed, milli in alarms if alarmed is kind] for kind in WasteKind}
    yield _family("phalanx_waste_alarms", (((kind.value,), len(held)) for kind, held in of_kind.items()))
    yield _family(
        "phalanx_waste_alarm_gpus", (((kind.value,), sum(held) / MILLI_PER_DEVICE) for kind, held in of_kind.items())
    )
    yield _family("phalanx_waste_alarms_begun", (((kind.value,), found.begun.get(kind.value, 0)) for kind in WasteKind))


def _head(runtime: ApiRuntime) -> Iterator[Metric]:
    services = runtime.services
    yield _family("phalanx_head_info", [((services.version, services.controller.head_id), 1)])
    stats = sorted(dict(services.controller.stats).items())
    yield _family("phalanx_controller_stat", (((name,), value) for name, value in stats))
    among = services.leader_status
    if among is not None:
        yield _single("phalanx_leader", among.leads())
        yield _single("phalanx_term", among.term)
        yield _family("phalanx_head_seen_age_seconds", (((head.name,), head.seen_ago_s) for head in among.heads()))
    disk = _disk_of(services.output_root)
    yield _single("phalanx_disk_free_bytes", disk.free)
    yield _single("phalanx_disk_bytes", disk.total)
    for what in ("submits", "lease_renewals", "events", "stream_bytes", "kept_bytes", "refusals"):
        yield _single(f"phalanx_{what}", runtime.counts.get(what, 0))
    yield _single("phalanx_event_streams_open", runtime.streams_open)
    yield _single("phalanx_exec_sessions_open", runtime.sessions.count())
    yield _single("phalanx_commands_waiting", sum(services.mailboxes.waiting().values()))


def _disk_of(folder: str) -> Any:
    """The disk of a folder that may not exist yet."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder)


def _history(services: HeadServices) -> Iterator[Metric]:
    if services.history is None:
        return
    found = services.history.health()
    yield _single("phalanx_history_bytes", found.size_bytes)
    yield _single("phalanx_history_failing", bool(found.problem))
    yield _single("phalanx_history_lost_hours", found.lost)
    yield _single("phalanx_history_stored_age_seconds", max(0.0, services.clock.now_s() - found.stored_s))


def _traces(runtime: ApiRuntime) -> Iterator[Metric]:
    tracer = runtime.job_tracer
    if tracer is None:
        return
    yield _single("phalanx_trace_spans_exported", tracer.exported)
    yield _single("phalanx_trace_jobs_dropped", tracer.dropped)
    yield _single("phalanx_trace_jobs_waiting", tracer.pending)
    yield _single("phalanx_trace_export_failing", bool(tracer.failure))


def _devices(services: HeadServices, nodes: list[Node]) -> Iterator[Metric]:
    values: dict[str, list[tuple[tuple[str, ...], float]]] = {name: [] for name in FAMILIES if name.startswith("DCGM_")}
    ages: list[tuple[tuple[str, ...], float]] = []
    now_s = services.clock.now_s()
    for node in nodes:
        samples = services.telemetry.node_samples(node.id)
        if samples is None:
            continue
        ages.append(((node.id,), max(0.0, now_s - samples.at_s)))
        if now_s - samples.at_s > max(_STALE_S, silence_s(samples)):
            continue
        models = {device.index: device for device in node.devices}
        for sample in samples.devices:
            labels = _labels(node, models.get(sample.index), sample)
            for name, value in _readings(sample):
                values[name].append((labels, value))
    for name, found in values.items():
        yield _family(name, found)
    yield _family("phalanx_node_sample_age_seconds", ages)


def _labels(node: Node, device: Device | None, sample: DeviceSample) -> tuple[str, ...]:
    return (
        str(sample.index),
        sample.uuid,
        f"{'virtual' if sample.virtual else 'nvidia'}{sample.index}",
        device.model if device is not None else "",
        node.hostname or node.id,
        node.id,
        str(sample.virtual).lower(),
        sample.job_id or "",
    )


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
