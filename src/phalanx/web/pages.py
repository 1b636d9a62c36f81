"""The pages as HTML tables, which read without JavaScript; the scripts put live views in their place. Each takes records of `wire.api`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx import __version__
from phalanx.core.accounting.advice.evidence import Advice
from phalanx.core.state.history import HistoryLine
from phalanx.core.units import format_duration
from phalanx.core.work.states import JobState
from phalanx.web.attempts import attempts_timeline
from phalanx.web.cells import live, moment, number, state_word
from phalanx.web.command_hints import option_text
from phalanx.web.document import RIGHTS, Viewer, document
from phalanx.web.html import Html, element, facts, join, link, page_path, table
from phalanx.wire.api.cell_states import HELD_STATES, CellState
from phalanx.wire.api.fleet import FleetFrame
from phalanx.wire.api.jobs import JobDetail, JobView, JobWasteView, WebPortView
from phalanx.wire.api.nodes import DeviceView, NodeView, node_state
from phalanx.wire.api.queues import QueueView

JOB_STATES: Final = tuple(state.value for state in JobState)
_STATE_OF_LETTER: Final = {state.letter: state for state in CellState}
_NODES_SHOWN: Final = 200  # in the table of the fleet for browsers without scripts


@dataclass(frozen=True, slots=True)
class SortOrder:
    """The column that the head has sorted a list by."""

    column: str
    ascending: bool


def fleet_page(frame: FleetFrame, viewer: Viewer) -> Html:
    """Return the fleet: a count of each state of GPUs, and a row for each node."""
    letters = "".join(frame.cells)
    counts = [
        element(
            "li",
            element("span", state.letter, class_=f"cell {state.value}", aria_hidden="true"),
            f" {state.words} ",
            element("strong", f"{letters.count(state.letter):,}", class_="count"),
            data_state=state.value,
            data_letter=state.letter,
            data_words=state.words,
            data_held="yes" if state in HELD_STATES else None,
        )
        for state in CellState
    ]
    legend = element("ul", counts, class_="legend", id="legend")
    summary = element(
        "div",
        [
            element("div", element("strong", value, data_count=key), f" {words}")
            for key, value, words in (
                ("held", f"{sum(letters.count(state.letter) for state in HELD_STATES):,}", "GPUs held"),
                ("gpus", f"{len(letters):,}", "GPUs"),
                ("nodes", f"{len(frame.nodes):,}", "nodes"),
                ("running", f"{frame.counts.get('running', 0):,}", "jobs running"),
                ("pending", f"{frame.counts.get('pending', 0):,}", "jobs waiting"),
            )
        ],
        class_="summary",
    )
    rows = [
        (
            link(name, "nodes", name),
            frame.places[at],
            frame.states[at],
            element("code", [_cell(letter) for letter in frame.cells[at]], class_="cells"),
            [join(link(job, "jobs", job), " ") for job in sorted(set(filter(None, frame.jobs[at])))],
        )
        for at, name in enumerate(frame.nodes[:_NODES_SHOWN])
    ]
    shown = table(("Node", "Place", "State", "GPUs", "Jobs"), rows, caption="Nodes", empty="No node has joined yet.")
    more = len(frame.nodes) - len(rows)
    rest = element("p", f"{more} more nodes: ", link("all nodes", "nodes")) if more > 0 else None
    fallback = (
        element("noscript", shown, rest) if viewer.csrf else join(shown, rest)
    )  # without a session no script is loaded
    return document("fleet", "Fleet", summary, legend, live(fallback), viewer=viewer)


def jobs_page(jobs: Sequence[JobView], after: str, asked: Mapping[str, str], order: SortOrder, viewer: Viewer) -> Html:
    """Return a page of jobs. `asked`: the filter; `after`: the cursor of the next page, empty at the end."""
    filters = {key: value for key, value in asked.items() if value}
    sorting = {"sort": order.column, "ascending": "true" if order.ascending else "false"}
    rows = [
        (
            link(job.id, "jobs", job.id),
            job.name,
            state_word(_job_state(job)),
            job.user,
            job.queue,
            number(job.gpu_count),
            moment(job.submit_s),
            _where(job) if job.state is JobState.RUNNING else job.detail,
        )
        for job in jobs
    ]
    titles = (
        _sort_link("Job", "number", order, "jobs", filters),
        _sort_link("Name", "name", order, "jobs", filters),
        _sort_link("State", "state", order, "jobs", filters),
        _sort_link("User", "user", order, "jobs", filters),
        _sort_link("Queue", "queue", order, "jobs", filters),
        _sort_link("GPUs", "gpus", order, "jobs", filters),
        "Submitted",
        "Where or why",
    )
    shown = table(titles, rows, caption="Jobs", empty="No job matches." if filters else "No jobs yet.")
    more = element("p", link("More jobs", "jobs", **filters, **sorting, after=after)) if after else None
    return document("jobs", "Jobs", _job_filter(asked, order), live(shown, more), viewer=viewer)


def job_page(
    detail: JobDetail,
    history: Sequence[HistoryLine],
    viewer: Viewer,
    *,
    may_change: bool,
    now_s: float,
    advice: Sequence[Advice] = (),
) -> Html:
    """Return one job: its facts, its attempts and its history, and advice for its next run."""
    job = detail.job
    shown = facts(
        (
            ("State", join(state_word(_job_state(job)), f" {job.detail}" if job.detail else "")),
            ("User", f"{job.user}, project {job.project}"),
            ("Queue", f"{job.queue}, priority {job.priority}"),
            ("GPUs", job.shape or job.gpus),
            ("Nodes", [join(link(node, "nodes", node), " ") for node in job.nodes]),
            ("Waste", "" if job.waste is None else join(_waste(job.waste), ", since ", moment(job.waste.since_s))),
            ("Submitted", moment(job.submit_s)),
            ("Started", moment(job.started_s)),
            ("Ended", moment(job.ended_s)),
            ("Exit code", "" if job.exit_code is None else str(job.exit_code)),
            ("Command", element("code", job.command) if job.command else ""),
            ("Folder", element("code", job.workdir) if job.workdir else ""),
            ("Output", element("code", job.output_dir) if job.output_dir else ""),
            ("After the end", element("code", job.on_end) if job.on_end else ""),
            ("Web pages", [_web_port(one) for one in job.web_ports]),
            ("Trackers", [element("a", one.name, " ", href=one.url, rel="noreferrer") for one in job.links]),
            ("Labels", ", ".join(f"{key}={value}" for key, value in sorted(job.labels.items()))),
            ("Time limit", "" if job.time_limit_s is None else format_duration(job.time_limit_s)),
            ("Restarts", str(job.restarts) if job.restarts else ""),
        )
    )
    rows = [(moment(line.at_s), line.kind.replace("_", " "), line.text) for line in history]
    lines = table(("Time", "Event", "What happened"), rows, caption="History", empty="Nothing has happened yet.")
    logs = element(
        "p",
        element("a", "Output of all ranks", href=f"/v1{page_path('jobs', job.id, 'logs')}"),
        " (JSON; needs the right to read the output)",
    )
    tried = attempts_timeline(detail.attempts, now_s)
    audit = link("What people did to this job", "audit", object=f"job_id={job.id}")
    changes = element("p", audit, " (audit trail)") if RIGHTS["audit"] in viewer.actions else None
    body = join(shown, tried, element("h2", "History"), lines, changes)
    shown_live = element("div", body, id="live", data_job=job.id, data_may_change="yes" if may_change else None)
    output = element("div", element("h2", "Output"), logs, id="output")
    tips = [element("li", element("code", option_text(one)), f": {one.change}. {one.measured}.") for one in advice]
    shown_advice = element("div", element("h2", "Advice"), element("ul", tips), id="advice") if tips else None
    return document("job", f"Job {job.id} {job.name}", shown_live, shown_advice, output, viewer=viewer)


def _web_port(port: WebPortView) -> Html:
    """Return a link to pages of the job, in a window of their own, which cannot reach this one."""
    shown = f"{port.name} ({port.port})" if port.name else f"port {port.port}"
    return join(element("a", shown, href=port.path, target="_blank", rel="noopener noreferrer"), " ")


def queues_page(queues: Sequence[QueueView], viewer: Viewer) -> Html:
    """Return the tree of queues, each below its parent."""
    rows = [
        (
            element("span", queue.id, class_=f"depth-{min(depth, 6)}"),
            "open" if queue.open else "closed",
            "" if queue.quota_gpus is None else str(queue.quota_gpus),
            number(queue.used_gpus),
            number(queue.borrowed_gpus),
            number(queue.lent_gpus),
            number(queue.room_gpus),
            str(queue.running),
            link(str(queue.pending), "jobs", queue=queue.id, state="pending") if queue.pending else "0",
            "; ".join(f"{one.jobs} wait: {one.detail or one.reason}" for one in queue.waiting),
        )
        for queue, depth in in_tree_order(queues)
    ]
    titles = ("Queue", "State", "Quota", "Used", "Borrowed", "Lent", "Room", "Running", "Waiting", "Why they wait")
    shown = table(titles, rows, caption="Queues, in GPUs", empty="There are no queues.")
    return document("queues", "Queues", live(shown), viewer=viewer)


def in_tree_order(queues: Sequence[QueueView]) -> list[tuple[QueueView, int]]:
    """Return each queue with its depth, parents before their children, siblings by id."""
    below: dict[str | None, list[QueueView]] = {}
    for queue in sorted(queues, key=lambda one: one.id):
        below.setdefault(queue.parent, []).append(queue)
    found: list[tuple[QueueView, int]] = []
    pending = [(queue, 0) for queue in reversed(below.get(None, []))]
    while pending:
        queue, depth = pending.pop()
        found.append((queue, depth))
        pending += [(child, depth + 1) for child in reversed(below.get(queue.id, []))]
    return found


def nodes_page(nodes: Sequence[NodeView], more: int, order: SortOrder, viewer: Viewer) -> Html:
    """Return nodes with their health. `more`: how many follow on further pages."""
    sorting = {"sort": order.column, "ascending": "true" if order.ascending else "false"}
    rows = [
        (
            link(node.id, "nodes", node.id),
            state_word(node_state(node)),
            _models(node),
            number(sum(device.job_id is not None for device in node.devices)),
            "" if node.load_1m is None else f"{node.load_1m:.1f}",
            str(node.failures) if node.failures else "",
            _health(node),
        )
        for node in nodes
    ]
    titles = (
        _sort_link("Node", "name", order, "nodes", {}),
        _sort_link("State", "state", order, "nodes", {}),
        _sort_link("GPUs", "gpus", order, "nodes", {}),
        _sort_link("Held", "held", order, "nodes", {}),
        "Load",
        _sort_link("Failures", "failures", order, "nodes", {}),
        "Health",
    )
    shown = table(titles, rows, caption="Nodes", empty="No node has joined yet.")
    further = element("p", link(f"{more} more nodes", "nodes", **sorting, after=nodes[-1].id)) if more else None
    return document("nodes", "Nodes", live(shown, further), viewer=viewer)


def node_page(node: NodeView, history: Sequence[HistoryLine], viewer: Viewer) -> Html:
    """Return one node: its facts, its GPUs and its newest history."""
    shown = facts(
        (
            ("State", join(state_word(node_state(node)), f" {_health(node)}" if _health(node) else "")),
            ("Address", node.address),
            ("Engine", node.engine),
            ("CPUs", str(node.cpus)),
            ("Memory", _gib(node.memory_bytes)),
            ("Labels", ", ".join(f"{key}={value}" for key, value in sorted(node.labels.items()))),
            ("Joined", moment(node.joined_s)),
            ("Reserved", "; ".join(f"{one.id} for {one.holders}" for one in node.reserved)),
            ("Pool", node.pool),
        )
    )
    devices = table(
        ("GPU", "Model", "Job", "Activity", "Memory", "Power", "Temperature", "Health"),
        [_device_row(device) for device in node.devices],
        caption="GPUs",
        empty="This node has no GPU.",
    )
    rows = [(moment(line.at_s), line.kind.replace("_", " "), line.text) for line in reversed(history)]
    lines = table(("Time", "Event", "What happened"), rows, caption="History", empty="Nothing is recorded.")
    body = join(shown, element("h2", "GPUs"), devices, element("h2", "History"), lines)
    shown_live = element("div", body, id="live", data_node=node.id)
    return document("node", f"Node {node.id}", shown_live, viewer=viewer)


def _sort_link(title: str, column: str, order: SortOrder, page: str, filters: Mapping[str, str]) -> Html:
    """Return a column's title as a link that sorts the whole list by it; a second time, the other way."""
    sorted_by = column == order.column
    ascending = not order.ascending if sorted_by else column not in ("gpus", "held", "failures")  # the largest first
    target = page_path(page, **filters, sort=column, ascending="true" if ascending else "false")
    mark = (" \u25b4" if order.ascending else " \u25be") if sorted_by else ""
    now = ("ascending" if order.ascending else "descending") if sorted_by else None
    return element("a", title + mark, href=target, class_="sort", data_sorted=now)


def _job_filter(asked: Mapping[str, str], order: SortOrder) -> Html:
    chosen = asked.get("state", "")
    states = [element("option", word, value=word, selected=word == chosen) for word in JOB_STATES]
    fields = [
        element(
            "label",
            title,
            element("input", name=name, value=asked.get(name, ""), maxlength="200", autocomplete="off"),
        )
        for name, title in (("user", "User"), ("queue", "Queue"), ("name", "Name"))
    ]
    every = element("option", "all states", value="")
    state = element("label", "State", element("select", every, states, name="state"))
    show = element("button", "Show", type="submit")
    kept = [
        element("input", type="hidden", name="sort", value=order.column),
        element("input", type="hidden", name="ascending", value="true" if order.ascending else "false"),
    ]
    return element("form", state, fields, kept, show, method="get", action="/jobs", class_="filter", id="filter")


def _cell(letter: str) -> Html:
    return element("span", letter, class_=f"cell {_STATE_OF_LETTER[letter].value}")


def _job_state(job: JobView) -> str:
    if job.state is JobState.PENDING:
        return job.pending_word
    return str(job.attempt_state or job.state) if job.state is JobState.RUNNING else job.state.value


def _where(job: JobView) -> str:
    return "; ".join(filter(None, (", ".join(job.nodes), "" if job.waste is None else _waste(job.waste))))


def _waste(waste: JobWasteView) -> str:
    return f"{number(waste.gpus)} GPUs {waste.kind.replace('_', ' ')}"


def _health(node: NodeView) -> str:
    broken = [str(device.index) for device in node.devices if not device.healthy]
    cordon = "" if node.cordon is None else f"by {node.cordon.by}: {node.cordon.why}"
    gpus = f"broken GPUs: {', '.join(broken)}" if broken else ""
    version = f"Phalanx {node.version}, the head {__version__}" if node.version not in ("", __version__) else ""
    others = ", ".join(node.outside)
    return "; ".join(filter(None, (node.down_cause, cordon, gpus, node.bad_node, node.slow, version, others)))


def _models(node: NodeView) -> str:
    models = sorted({device.model for device in node.devices})
    return f"{len(node.devices)} x {', '.join(models)}" if models else "none"


def _device_row(device: DeviceView) -> tuple[Html | str, ...]:
    used = "" if device.memory_used_bytes is None else f"{_gib(device.memory_used_bytes)} of "
    return (
        str(device.index),
        device.model,
        link(device.job_id, "jobs", device.job_id) if device.job_id else "",
        "" if device.utilization is None else f"{100 * device.utilization:.0f} %",
        used + _gib(device.memory_bytes),
        "" if device.power_w is None else f"{device.power_w:.0f} W",
        "" if device.temperature_c is None else f"{device.temperature_c:.0f} °C",
        ", ".join(device.throttle) or ("healthy" if device.healthy else "broken"),
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
