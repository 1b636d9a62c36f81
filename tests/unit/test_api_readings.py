"""How often the API reads the store to answer, and which figures of queues it computes."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, func-returns-value, redundant-expr, index"

from collections import Counter
from types import SimpleNamespace

from phalanx.api.routes import nodes, queues
from phalanx.api.services import ApiLimits
from phalanx.controller.telemetry import Telemetry
from phalanx.controller.usage.waste_monitor import WasteNow
from phalanx.core.access.caller import Caller
from phalanx.core.resources import Resources
from phalanx.core.work.states import AttemptState, JobState
from phalanx.core.work.users import UserRole
from phalanx.ports.store import Batch
from phalanx.store.logs.files import FileLogs
from phalanx.store.memory import MemoryStore
from tests.contract.records import attempt, job, node, queue

CALLER = Caller(user="ann", role=UserRole.USER, token_id="t1")


class CountedStore:
    """Counts the reads of the store that it wraps."""

    def __init__(self, store):
        self._store, self.reads = store, Counter()

    def __getattr__(self, name):
        self.reads[name] += 1
        return getattr(self._store, name)


def head_with(folder, jobs_of_each_state, queue_names=("default",)):
    """The services of a head whose store holds so many running, requeued and ended jobs."""
    records = [node(), *(queue(name) for name in queue_names)]
    states = (JobState.RUNNING, JobState.PENDING, JobState.FAILED)
    for seq in range(1, 3 * jobs_of_each_state + 1):
        state = states[seq % 3]
        records.append(job(seq, state, epoch=1, queue=queue_names[seq % len(queue_names)]))
        records.append(attempt(seq, 1, AttemptState.RUNNING if state is JobState.RUNNING else AttemptState.ENDED))
    store = MemoryStore()
    store.commit(Batch(records=records))
    jobs = [one for one in records if hasattr(one, "spec")]
    return SimpleNamespace(
        store=CountedStore(store),
        logs=FileLogs(str(folder)),
        telemetry=Telemetry(),
        clock=SimpleNamespace(now_s=lambda: 10.0),
        controller=SimpleNamespace(
            wait_reasons={},
            head_id="h",
            pending_jobs=lambda: [one for one in jobs if one.state is JobState.PENDING],
            live_attempts=lambda: [(one, store.attempts(one.id)[0]) for one in jobs if one.state is JobState.RUNNING],
            fleet_capacity=lambda: Resources(8000),
            fleet_nodes=lambda: [node()],
        ),
        version="1",
        output_root="/outputs",
        limits=ApiLimits(answer_bytes=2_000_000),
        waste=WasteNow,
    )


def test_overview_reads_the_store_as_often_for_1_job_as_for_200(tmp_path):
    one, many = head_with(tmp_path / "one", 1), head_with(tmp_path / "many", 200)
    assert len(nodes._overview(one, CALLER).running) == 1
    overview = nodes._overview(many, CALLER)
    assert (len(overview.running), len(overview.pending), len(overview.recent)) == (200, 200, 20)
    assert all(view.shape == "1 x 2" for view in [*overview.running, *overview.pending, *overview.recent])
    assert many.store.reads == one.store.reads


def test_one_queue_is_computed_alone_with_the_figures_of_the_list(monkeypatch, tmp_path):
    head = head_with(tmp_path, 7, queue_names=("a", "b", "default"))
    listed = {view.id: view for view in queues.read_queues(head)}
    computed = []
    monkeypatch.setattr(
        queues, "_view", lambda queue, *_, view=queues._view: computed.append(queue.id) or view(queue, *_)
    )
    assert queues.read_queues(head, "b") == [listed["b"]]
    assert computed == ["b"]
    assert queues.read_queues(head, "none") == []
