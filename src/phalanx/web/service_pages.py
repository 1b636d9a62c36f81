"""The pages of services: the list, and one service with its replicas, its revisions and what may be done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.core.ids import ServiceId
from phalanx.core.units import format_latency
from phalanx.core.work.services.rollout_terms import WHOLE
from phalanx.core.work.services.service import ServiceState
from phalanx.core.work.states import JobState
from phalanx.web.cells import live, moment, state_word
from phalanx.web.document import Viewer, document
from phalanx.web.html import Child, Html, element, facts, join, link, table
from phalanx.wire.api.canary_text import comparison_of, progress_of
from phalanx.wire.api.services import LoadView, ServiceDetail, ServiceView, replica_state


def services_page(
    services: Sequence[ServiceView], loads: Mapping[ServiceId, LoadView | None], more: int, viewer: Viewer
) -> Html:
    """Return services by name. `loads`: of those that gateways report. `more`: how many follow on further pages."""
    rows = [
        (
            link(one.name, "services", one.name),
            state_word(one.state.value),
            _readiness(one),
            _rollout(one),
            _load(loads.get(one.name)),
            one.user,
            one.queue,
            one.gpus,
            [join(f"{end.address}:{end.port}", " ") for end in one.endpoints if end.ready],
            one.detail,
        )
        for one in services
    ]
    titles = (
        "Service",
        "State",
        "Replicas",
        "Revision",
        "Load",
        "User",
        "Queue",
        "GPUs each",
        "Endpoints",
        "Waits for",
    )
    shown = table(
        titles, rows, caption="Services", empty="There are no services. Submit a job file with type: service."
    )
    further = element("p", link(f"{more} more services", "services", after=services[-1].name)) if more else None
    return document("services", "Services", live(shown, further), viewer=viewer)


def service_page(detail: ServiceDetail, viewer: Viewer, *, may_change: bool) -> Html:
    """Return one service. `may_change`: whether the viewer may scale, update and stop it."""
    service = detail.service
    check = "it accepts connections" if service.ready_check == "tcp" else f"GET {service.ready_check} succeeds"
    shown = facts(
        (
            ("State", join(state_word(service.state.value), f" {service.detail}" if service.detail else "")),
            ("Replicas", _readiness(service)),
            ("Range", f"{service.replicas}, {service.gpus} {'GPU' if service.gpus == '1' else 'GPUs'} each"),
            ("Prompts", f"reads those of {service.prefill_for} ({service.protocol})" if service.prefill_for else ""),
            ("Targets", ", ".join(f"{name} {text}" for name, text in service.scale.items())),
            ("Load", _load(detail.load)),
            ("Wanted since", join(moment(service.load_s), f": {service.load_why}") if service.load_why else ""),
            ("Revision", _rollout(service)),
            ("Rollout", _canary(detail)),
            ("Last failure", service.failure),
            ("Port", f"{service.port or 'any free one'}; ready when {check}"),
            ("User", f"{service.user}, project {service.project}"),
            ("Queue", service.queue),
            ("Created", moment(service.created_s)),
            ("Stopped", join(moment(service.stopped_s), f" by {service.stopped_by}") if service.stopped_by else ""),
            ("Command", element("code", service.command) if service.command else ""),
        )
    )
    stopped = service.state is ServiceState.STOPPED
    part = element(
        "div",
        shown,
        element("h2", "Replicas"),
        _replicas(detail),
        element("h2", "Revisions"),
        _revisions(detail),
        id="live",
        data_service=service.name,
        data_desired=str(service.desired),
        data_range=service.replicas,
        data_revision=str(service.revision),
        data_revisions=" ".join(str(one.number) for one in detail.revisions),
        data_can_sleep="yes" if service.can_sleep else None,
        data_may_change="yes" if may_change and not stopped else None,
    )
    return document("service", f"Service {service.name}", part, viewer=viewer)


def _replicas(detail: ServiceDetail) -> Html:
    ends = {end.job_id: end for end in detail.service.endpoints}
    rows = []
    for job in detail.replicas:
        end, running = ends.get(job.id), job.state is JobState.RUNNING
        rows.append(
            (
                link(job.id, "jobs", job.id),
                str(job.revision),
                state_word(replica_state(job)),
                [join(link(node, "nodes", node), " ") for node in job.nodes] if running else "",
                "" if end is None else f"{end.address}:{end.port}",
                str(job.restarts) if job.restarts else "",
                job.detail if job.state is JobState.PENDING else job.sleep_why,
            )
        )
    titles = ("Job", "Revision", "State", "Nodes", "Endpoint", "Restarts", "Why")
    return table(titles, rows, caption="Replicas", empty="No replica is wanted now.")


def _revisions(detail: ServiceDetail) -> Html:
    service = detail.service
    rows = [
        (
            _number(service, one.number),
            moment(one.created_s),
            one.by,
            one.replicas,
            one.gpus,
            element("code", one.command) if one.command else "",
        )
        for one in detail.revisions
    ]
    titles = ("Revision", "Created", "By", "Replicas", "GPUs each", "Command")
    return table(titles, rows, caption="Revisions, newest first", empty="There are no revisions.")


def _number(service: ServiceView, revision: int) -> str:
    if revision == service.revision:
        return f"{revision} (wanted now)"
    return f"{revision} (serving)" if revision == service.served_revision else str(revision)


def _readiness(service: ServiceView) -> Html:
    """Return how many replicas are ready of those that shall be awake, in words and as a bar."""
    awake = service.desired - service.asleep_wanted
    text = f"{service.ready} of {awake} ready" if service.ready <= awake else f"{service.ready} ready, {awake} wanted"
    if service.asleep_wanted:
        text += f", {service.asleep} of {service.asleep_wanted} asleep"
    return join(text, _bar(service.ready, awake, text))


def _load(load: LoadView | None) -> str:
    """Return the load as gateways report it; "" if none does."""
    if load is None:
        return ""
    waits = f" for up to {format_latency(load.oldest_wait_s)}" if load.waiting else ""
    first = f"; first token {format_latency(load.ttft_s)}" if load.ttft_s else ""
    needed = f"{load.needed} {'replica' if load.needed == 1 else 'replicas'} needed"
    return f"{load.in_flight} in flight, {load.waiting} waiting{waits}{first}; {needed}"


def _canary(detail: ServiceDetail) -> Html | str:
    """Return the share of the new revision as a bar, and what was compared; "" without a rollout by shares."""
    canary = detail.canary
    if canary is None:
        return ""
    since = join(" since ", moment(canary.step_s)) if canary.share and canary.step_s is not None else ""
    text = progress_of(canary, None)
    return join(text, since, _bar(canary.share, WHOLE, text), element("div", comparison_of(canary)))


def _rollout(service: ServiceView) -> Html:
    """Return the revision, and during a rollout how far it is."""
    if service.state is ServiceState.STOPPED or service.revision == service.served_revision:
        return join(str(service.revision))
    ready = sum(end.ready for end in service.endpoints if end.revision == service.revision)
    awake = service.desired - service.asleep_wanted
    before = f"from {service.served_revision} " if service.served_revision else ""
    canary = service.canary
    if canary is not None and canary.revision == service.revision and 0 < canary.share < WHOLE:
        text = f"canary {before}to {service.revision}: {canary.share / 10:g} % of the sessions"
        return join(text, _bar(canary.share, WHOLE, text))
    text = f"rollout {before}to {service.revision}: {ready} of {awake} ready"
    return join(text, _bar(ready, awake, text))


def _bar(value: int, whole: int, words: str) -> Child:
    if whole <= 0:
        return None
    return join(" ", element("meter", words, min="0", max=str(whole), value=str(value), aria_label=words))
