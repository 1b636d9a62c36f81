"""The page of a service, and the table of services in `phalanx ps`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from phalanx.cli import cells
from phalanx.cli.list_output import ListView
from phalanx.cli.serve.model_source import source_text
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control, truncate
from phalanx.cli.wait_text import wait_text
from phalanx.core.units import format_duration, format_latency
from phalanx.core.work.services.revision_changes import KeyChange
from phalanx.core.work.services.service import ServiceState
from phalanx.core.work.states import JobState
from phalanx.wire.api.canary_text import comparison_of, progress_of
from phalanx.wire.api.services import RevisionView, ServiceDetail, ServiceView, replica_state

_REVISIONS_MAX: Final = 5  # newest ones
_SERVICES: Final = (
    Column(title="SERVICE"),
    Column(title="STATE"),
    Column(title="READY"),
    Column(title="REVISION", right=True),
    Column(title="USER", min_width=4, drop_order=2),
    Column(title="ENDPOINTS", min_width=16, drop_order=1),
)
_REPLICAS: Final = (
    Column(title="REPLICA", right=True),
    Column(title="REVISION", right=True),
    Column(title="STATE"),
    Column(title="NODES"),
    Column(title="ENDPOINT"),
    Column(title="RESTARTS", right=True, hide_empty=True),
    Column(title="WHY", min_width=16, hide_empty=True),
)
_REVISIONS: Final = (
    Column(title="REVISION", right=True),
    Column(title="AGE", right=True),
    Column(title="BY"),
    Column(title="REPLICAS"),
    Column(title="GPUS"),
    Column(title="CHANGED", min_width=16, max_width=60, hide_empty=True),
    Column(title="COMMAND", min_width=16),
)


def service_lines(services: Sequence[ServiceView], screen: Terminal) -> list[str]:
    """Return the table of services."""
    rows: list[list[Cell | str]] = [
        [
            Cell(one.name, "bold"),
            cells.state_cell(one.state.value),
            _ready(one),
            str(one.revision),
            one.user,
            " ".join(f"{end.address}:{end.port}" for end in one.endpoints if end.ready) or one.detail,
        ]
        for one in services
    ]
    return table(_SERVICES, rows, screen)


def service_view(detail: ServiceDetail, now_s: float, readers: Sequence[str] = ()) -> ListView:
    """Return the page of a service. `readers`: services that read its prompts."""
    return ListView(
        value=detail,
        lines=lambda screen: service_page(detail, screen, now_s, readers),
        next_command=_next(detail.service),
    )


def service_page(detail: ServiceDetail, screen: Terminal, now_s: float, readers: Sequence[str] = ()) -> list[str]:
    """Return the lines of the page: headline, replicas with their endpoints, revisions."""
    service = detail.service
    labels = next((one.labels for one in detail.revisions if one.number == service.revision), {})
    facts = {
        "command": service.command,
        "model": source_text(labels),
        "who": f"{service.user}, project {service.project}, queue {service.queue}",
        "replicas": f"{_ready_text(service)}, range {service.replicas}, {service.gpus} {'GPU' if service.gpus == '1' else 'GPUs'} each",
        "port": f"{service.port or 'any free one'}, ready when {_check(service)}",
        "prompts": f"reads those of {service.prefill_for} ({service.protocol})"
        if service.prefill_for
        else ("read by " + ", ".join(readers) if readers else ""),
        "targets": _targets(service),
        "load": _load(detail),
        "wanted": _wanted(service, now_s),
        "rollout": "" if detail.canary is None else progress_of(detail.canary, now_s),
        "compared": "" if detail.canary is None else comparison_of(detail.canary),
        "waits": service.detail,
        "failure": service.failure,
        "stopped": service.stopped_by and f"by {service.stopped_by}",
    }
    state = cells.state_cell(service.state.value)
    lines = [
        f"{screen.paint(f'service {service.name}', 'bold')}: {screen.paint(state.text, state.style)}, revision {service.revision}",
        *(truncate(f"  {name:<10}{strip_control(text)}", screen.width) for name, text in facts.items() if text),
    ]
    if detail.replicas:
        lines += ["", screen.paint("replicas", "bold"), *table(_REPLICAS, _replica_rows(detail), screen)]
    newest = detail.revisions[:_REVISIONS_MAX]
    rows = [_revision_row(one, service, now_s) for one in newest]
    return [*lines, "", screen.paint("revisions", "bold"), *table(_REVISIONS, rows, screen)]


def why_service_lines(detail: ServiceDetail, screen: Terminal, now_s: float) -> list[str]:
    """Return why a service has so many replicas, and what it waits for."""
    service = detail.service
    awake = service.desired - service.asleep_wanted
    least = f"at least {service.least} of {service.replicas}" if service.scale else f"range {service.replicas}"
    facts = {
        "wanted": _wanted(service, now_s) or f"{awake} {'replica' if awake == 1 else 'replicas'}, {least}",
        "targets": _targets(service),
        "load": _load(detail),
        "rollout": "" if detail.canary is None else progress_of(detail.canary, now_s),
        "compared": "" if detail.canary is None else comparison_of(detail.canary),
        "waits": service.detail,
        "failure": service.failure,
    }
    head = f"{screen.paint(f'service {service.name}', 'bold')}: {service.state.value}, {_ready_text(service)}"
    return [
        head,
        *(truncate(f"  {name:<10}{strip_control(text)}", screen.width) for name, text in facts.items() if text),
    ]


def _replica_rows(detail: ServiceDetail) -> list[list[Cell | str]]:
    endpoints = {end.job_id: end for end in detail.service.endpoints}
    rows: list[list[Cell | str]] = []
    for job in detail.replicas:
        end = endpoints.get(job.id)
        rows.append(
            [
                Cell(job.id, "bold"),
                str(job.revision),
                cells.state_cell(replica_state(job)),
                ", ".join(job.nodes) if job.state is JobState.RUNNING else "",
                "" if end is None else f"{end.address}:{end.port}",
                str(job.restarts) if job.restarts else "",
                wait_text(job.reason, job.detail) if job.state is JobState.PENDING else job.sleep_why,
            ]
        )
    return rows


def _revision_row(one: RevisionView, service: ServiceView, now_s: float) -> list[Cell | str]:
    mark = "*" if one.number == service.revision else ""
    return [
        f"{mark}{one.number}",
        cells.age(one.created_s, now_s),
        one.by,
        one.replicas,
        one.gpus,
        ", ".join(map(_change_text, one.changes)),
        one.command,
    ]


def _change_text(change: KeyChange) -> str:
    """Return a change in a few words: `gpus 1 -> 2`, `env MODEL`, `run`."""
    if change.key == "run" or not (change.before or change.after):
        return change.key
    return f"{change.key} {change.before or 'none'} -> {change.after or 'none'}"


def _ready(service: ServiceView) -> str:
    asleep = f" {service.asleep} asleep" if service.asleep else ""
    return f"{service.ready}/{service.desired - service.asleep_wanted}{asleep}"


def _ready_text(service: ServiceView) -> str:
    wanted = service.desired - service.asleep_wanted
    awake = (
        f"{service.ready} of {wanted} ready" if service.ready <= wanted else f"{service.ready} ready, {wanted} wanted"
    )
    return f"{awake}, {service.asleep} of {service.asleep_wanted} asleep" if service.asleep_wanted else awake


def _targets(service: ServiceView) -> str:
    """Return what the number of replicas follows."""
    names = {"ttft": "first token within", "queue": "queue wait", "kv": "KV use", "in_flight": "requests each"}
    found = [f"{name} {service.scale[key]}" for key, name in names.items() if key in service.scale]
    if service.scale and service.least == 0:
        found.append(f"none after {service.scale['idle']} without requests")
    return ", ".join(found)


def _load(detail: ServiceDetail) -> str:
    """Return the load now, as far as it counts."""
    service, load = detail.service, detail.load
    if not service.scale or service.stopped_by:
        return ""
    if load is None:
        return "unknown: no gateway has reported for 5s, so the number stays"
    parts = [f"{load.in_flight} in flight, {load.waiting} waiting"]
    if load.waiting:
        parts.append(f"for up to {format_latency(load.oldest_wait_s)}")
    if load.ttft_s:
        parts.append(f"first token {format_latency(load.ttft_s)}")
    if "kv" in service.scale:
        parts.append(f"KV use {load.kv:.0%}")
    most = service.replicas.rpartition("..")[2]
    if load.needed > int(most):
        parts.append(f"needs {load.needed}, the range ends at {most}")
    return f"{', '.join(parts)} ({load.gateways} {'gateway' if load.gateways == 1 else 'gateways'})"


def _wanted(service: ServiceView, now_s: float) -> str:
    """Return how many replicas the load asked for last, when and why."""
    if not service.load_why or service.load_s is None:
        return ""
    count = service.desired - service.asleep_wanted
    return f"{count} {'replica' if count == 1 else 'replicas'} since {format_duration(max(0.0, now_s - service.load_s))}: {service.load_why}"


def _check(service: ServiceView) -> str:
    return "it accepts connections" if service.ready_check == "tcp" else f"GET {service.ready_check} succeeds"


def _next(service: ServiceView) -> str:
    match service.state:
        case ServiceState.STOPPED:
            return "phalanx submit FILE"
        case ServiceState.SLEEPING:
            return (
                f"phalanx wake {service.name}"
                if service.asleep_wanted
                else f"phalanx scale {service.name} {service.first_replicas}"
            )
        case _:
            return f"phalanx logs {service.name}"
