"""The supervisors' channel and what is seen of nodes: each supervisor speaks for its own node, of its own jobs, once."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import hashlib
import threading
from concurrent.futures import Future
from dataclasses import replace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from phalanx.core.errors import TryLater
from phalanx.core.state.commands import CleanUpAttempt, PrepareTasks
from phalanx.core.state.reports import CheckpointSaved, MemberReady, MemberStarted, NodeDied, SupervisorRegistered
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.wire.metrics import FAMILIES
from phalanx.wire.supervisor import (
    STREAM_CHUNK_BYTES_MAX,
    CommandsReply,
    DeviceSample,
    EventsRequest,
    HelloRequest,
    LeaseRequest,
    SamplesRequest,
    decode,
    decode_command,
)
from tests.contract.api_head import JOB, Supervisor, code, make_node, unknown_event, until


@pytest.fixture
def supervisor(call):
    supervisor = Supervisor(call)
    supervisor.hello()
    return supervisor


def commands(call, after=0, wait_s=0, node_id="n0"):
    reply = call(f"node:{node_id}", "GET", f"/v1/node/commands?after={after}&wait_s={wait_s}")
    assert reply.status_code == 200, reply.text
    return decode(reply.content, CommandsReply)


def samples(job_id=None, busy=0.5, node_id="n0", at_s=None, supervisor_id="s1"):
    devices = [
        DeviceSample(
            index=i,
            uuid=f"VIRTUAL-n0-{i}",
            counter="rank_cpu",
            utilization=busy,
            memory_used_bytes=1 << 20,
            virtual=True,
            memory_total_bytes=3 << 20,
            power_w=100.0,
            temperature_c=40.0,
            job_id=job_id if i < 2 else None,
        )
        for i in range(4)
    ]
    return SamplesRequest(supervisor_id=supervisor_id, node_id=node_id, at_s=at_s, devices=devices, load_1m=1.5)


# ---- hello and lease --------------------------------------------------------------------------------------------------


def test_before_hello_everything_is_answered_by_say_hello(call):
    stranger = Supervisor(call)
    assert code(stranger.lease()) == (409, "say_hello")
    assert code(stranger.post("events", EventsRequest(supervisor_id="s1", events=[]))) == (409, "say_hello")
    assert code(call("node:n0", "GET", "/v1/node/commands")) == (409, "say_hello")
    assert code(stranger.post("samples", samples(at_s=1.0))) == (409, "say_hello")
    assert stranger.lease().json()["error"]["retry"]


def test_hello_brings_the_node_up_with_a_lease(call, supervisor):
    assert supervisor.lease().json()["lease_s"] > 0
    node = call("viewer", "GET", "/v1/nodes/n0").json()["node"]
    assert (node["state"], len(node["devices"]), node["virtual"], node["jobs"]) == ("up", 4, True, [])


def test_supervisor_speaks_for_its_own_node_alone(call, supervisor):
    hello = HelloRequest(version=1, supervisor_id="s1", node=make_node("n1"), members=[])
    assert code(call("node:n0", "POST", "/v1/node/hello", hello)) == (403, "not_permitted")
    lease = LeaseRequest(supervisor_id="s1", node_id="n1", epochs=[])
    assert code(call("node:n0", "POST", "/v1/node/lease", lease)) == (403, "not_permitted")
    assert code(supervisor.post("samples", samples(node_id="n1", at_s=1.0))) == (403, "not_permitted")


def test_supervisor_of_another_release_is_told_to_be_updated(call):
    hello = HelloRequest(version=99, supervisor_id="s1", node=make_node(), members=[])
    assert code(call("node:n0", "POST", "/v1/node/hello", hello)) == (400, "bad_request")


def test_a_second_supervisor_of_a_node_takes_the_first_ones_place(call, supervisor):
    later = Supervisor(call, supervisor_id="s2")
    later.hello()
    assert code(supervisor.lease()) == (409, "say_hello")
    assert later.lease().status_code == 200


def test_it_says_hello_again_with_what_it_was_told_or_is_not_heard(call, supervisor):
    """Else a hello that lay in a buffer, of one that is dead, would take the place of the one that lives."""
    later = Supervisor(call, supervisor_id="s2")
    call.submit()
    told = later.hello(challenge="")["challenge"]
    assert told
    commands = call("node:n0", "GET", "/v1/node/commands?after=0&wait_s=5").json()["commands"]
    assert [command["kind"] for command in commands] == ["PrepareTasks"], "what is not heard takes nobody's commands"
    assert supervisor.lease().status_code == 200
    assert code(later.lease()) == (409, "say_hello")
    assert later.hello(challenge=told)["challenge"] == ""
    assert code(supervisor.lease()) == (409, "say_hello")
    assert later.lease().status_code == 200
    assert later.hello(challenge="")["challenge"] == "", "it replaces nobody"


def test_a_supervisor_ends_its_own_lease_when_it_leaves_and_no_other(call, supervisor):
    left = NodeDied(node_id="n0", supervisor_id="s1", why="it left the cluster", confirmed=True, planned=True)
    for other in (replace(left, node_id="n1"), replace(left, supervisor_id="s2")):
        request = EventsRequest(supervisor_id="s1", events=supervisor.framed(other))
        assert code(supervisor.post("events", request)) == (403, "not_permitted")
    assert supervisor.lease().status_code == 200
    supervisor.tell(left)
    node = call("viewer", "GET", "/v1/nodes/n0").json()["node"]
    assert (node["state"], node["down_cause"]) == ("down", "it left the cluster")
    assert node["failures"] == 0, "no failure that would shorten the expected time between failures"
    assert code(supervisor.lease()) == (409, "say_hello")
    supervisor.hello()
    assert call("viewer", "GET", "/v1/nodes/n0").json()["node"]["state"] == "up"


def test_lease_names_epochs_that_no_longer_count(call, supervisor):
    job_id = call.submit()
    supervisor.run(job_id)
    assert supervisor.lease([(job_id, 1)]).json()["superseded"] == []
    assert supervisor.lease([(job_id, 1), ("77", 3)]).json()["superseded"] == [["77", 3]]


# ---- commands ---------------------------------------------------------------------------------------------------------


def test_commands_are_for_the_supervisor_that_speaks_and_counted_by_this_head(call, supervisor):
    """Found by reading: one that was replaced polled on with its node's token, and obeyed; and a count of the head before was taken for ours."""
    job_id = call.submit()
    head = commands(call).head_id

    def poll(words):
        return call("node:n0", "GET", f"/v1/node/commands?after=0&wait_s=0&{words}")

    assert code(poll("supervisor=s0")) == (409, "say_hello")
    assert code(poll("supervisor=s1&head=another")) == (409, "say_hello")
    taken = decode(poll(f"supervisor=s1&head={head}").content, CommandsReply)
    assert [decode_command(one).job_id for one in taken.commands] == [job_id]


def test_long_poll_wakes_when_a_command_comes(call, supervisor):
    got = []
    thread = threading.Thread(target=lambda: got.append(commands(call, wait_s=3)), daemon=True)
    thread.start()
    job_id = call.submit()
    thread.join(timeout=100)
    command = decode_command(got[0].commands[0])
    assert isinstance(command, PrepareTasks)
    assert command.job_id == job_id


def test_commands_that_came_of_anothers_hello_are_not_for_an_open_poll(head, call, supervisor):
    """Found by reading: they are posted before that hello is answered, and whoever was replaced there took them first."""
    got = []
    thread = threading.Thread(
        target=lambda: got.append(call("node:n0", "GET", "/v1/node/commands?after=0&wait_s=20&supervisor=s1")),
        daemon=True,
    )
    thread.start()
    until(lambda: "n0" in head.mailboxes._boxes and head.mailboxes._boxes["n0"].listeners)
    now_s = head.clock.boottime_s()
    head.driver.leases.drop(["n0"])
    head.driver.leases.grant("n0", "s2", now_s)
    head.mailboxes.post("n0", CleanUpAttempt(node_id="n0", job_id="1", epoch=1))
    thread.join(timeout=100)
    assert code(got[0]) == (409, "say_hello")


def test_commands_are_given_again_until_asked_past(call, supervisor):
    call.submit(gpus=1)
    until(lambda: commands(call).commands)
    first = commands(call)
    assert commands(call).commands == first.commands
    assert commands(call, after=first.last).commands == []
    assert commands(call).commands == []  # asked past: gone


def test_hello_drops_what_an_earlier_life_of_the_supervisor_was_told(call, supervisor):
    call.submit(gpus=1)
    until(lambda: commands(call).commands)
    later = Supervisor(call, supervisor_id="s2")
    after = later.hello()["after"]
    assert after > 0
    assert all(framed.seq > after for framed in commands(call, after=after).commands)


def test_poll_without_news_ends_with_its_wait(call, supervisor):
    assert commands(call, wait_s=0.05).commands == []


# ---- events -----------------------------------------------------------------------------------------------------------


def test_events_are_durable_when_acknowledged_and_heard_once(head, call, supervisor):
    job_id = call.submit()
    until(lambda: head.store.attempts(job_id))
    place = {"job_id": job_id, "epoch": 1, "generation": 0, "node_id": "n0"}
    request = EventsRequest(
        supervisor_id="s1", events=supervisor.framed(MemberReady(**place, port=1), MemberStarted(**place, at_s=1.0))
    )
    assert supervisor.post("events", request).json() == {"acked": 2}
    assert head.store.attempts(job_id)[-1].state == "running"
    heard = head.driver.stats["events"]
    assert supervisor.post("events", request).json() == {"acked": 2}
    assert head.driver.stats["events"] == heard


def test_event_of_a_later_release_is_refused_once_and_stops_nothing(head, call, supervisor):
    job_id = call.submit()
    until(lambda: head.store.attempts(job_id))
    place = {"job_id": job_id, "epoch": 1, "generation": 0, "node_id": "n0"}
    ready, started = supervisor.framed(MemberReady(**place, port=1), MemberStarted(**place, at_s=1.0))
    odd = msgspec.structs.replace(unknown_event(2))
    request = EventsRequest(supervisor_id="s1", events=[ready, odd, msgspec.structs.replace(started, seq=3)])
    assert code(supervisor.post("events", request)) == (400, "bad_request")
    assert head.store.attempts(job_id)[-1].state == "running"
    assert supervisor.post("events", request).json() == {"acked": 3}


def test_events_about_others_are_refused(head, call, supervisor):
    other = Supervisor(call, node_id="n1", supervisor_id="s9", devices=1)
    other.hello()
    job_id = call.submit(gpus=4)
    until(lambda: head.store.attempts(job_id))
    place = {"job_id": job_id, "epoch": 1, "generation": 0}
    for event in (
        MemberReady(**place, node_id="n0"),  # another node's word
        MemberReady(**place, node_id="n1"),  # a job that n1 does not carry
        MemberReady(job_id="404", epoch=1, generation=0, node_id="n1"),
        CheckpointSaved(
            job_id=job_id, generation=0, node_id="n1", resume=PublishedCheckpoint(epoch=1, step=1, path="/x", digest="")
        ),
    ):
        request = EventsRequest(supervisor_id="s9", events=other.framed(event))
        assert code(other.post("events", request)) == (403, "not_permitted")
    assert head.store.attempts(job_id)[-1].state == "placed"


def test_events_stay_unacknowledged_while_the_store_refuses(head, call, supervisor, monkeypatch):
    job_id = call.submit()
    until(lambda: head.store.attempts(job_id))
    place = {"job_id": job_id, "epoch": 1, "generation": 0, "node_id": "n0"}
    request = EventsRequest(supervisor_id="s1", events=supervisor.framed(MemberReady(**place, port=1)))

    def refuse(_self, _reports):
        future = Future()
        future.set_exception(TryLater("the disk is full"))
        return future

    with monkeypatch.context() as patch:
        patch.setattr(type(head.driver), "report", refuse)
        assert code(supervisor.post("events", request)) == (503, "try_later")
    assert supervisor.post("events", request).json() == {"acked": 1}


# ---- streams ----------------------------------------------------------------------------------------------------------


def test_resent_chunks_neither_double_nor_leave_a_gap(head, call, supervisor):
    job_id = call.submit()
    assert supervisor.ship(job_id, 1, "rank-0", 0, b"abcdef").json()["ends"][0]["end"] == 6
    assert supervisor.ship(job_id, 1, "rank-0", 3, b"defghi").json()["ends"][0]["end"] == 9
    assert supervisor.ship(job_id, 1, "rank-0", 20, b"later").json()["ends"][0]["end"] == 9
    text = call("user", "GET", f"/v1/jobs/{job_id}/logs").json()["chunks"][0]["text"]
    assert text == "abcdefghi"


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ("rank-7", 403),
        ("steps-1", 403),
        ("supervisor-1", 403),
        ("../x", 400),
        ("rank-", 400),
        ("rank-0/..", 400),
        ("x-1", 400),
        ("rank-1", 200),
        ("steps-0", 200),
        ("supervisor-0", 200),
    ],
)
def test_only_own_streams_are_written(call, supervisor, stream, expected):
    job_id = call.submit()
    assert supervisor.ship(job_id, 1, stream, 0, b"x").status_code == expected


def test_streams_of_jobs_elsewhere_and_overlong_chunks_are_refused(call, supervisor):
    job_id = call.submit()
    assert supervisor.ship(job_id, 2, "rank-0", 0, b"x").status_code == 403
    assert supervisor.ship("404", 1, "rank-0", 0, b"x").status_code == 403
    assert supervisor.ship(job_id, 1, "rank-0", 0, b"x" * (STREAM_CHUNK_BYTES_MAX + 1)).status_code == 400
    assert supervisor.ship(job_id, 1, "rank-0", -1, b"x").status_code == 400


# ---- what is seen -------------------------------------------------------------------------------------------------------


def test_overview_shows_devices_with_their_job_and_ranks(head, call, supervisor):
    job_id = call.submit()
    supervisor.run(job_id)
    call.submit("other", gpus=4)
    assert supervisor.post("samples", samples(job_id, 0.75, at_s=head.clock.now_s())).status_code == 204
    shown = call("viewer", "GET", "/v1/overview").json()
    devices = shown["nodes"][0]["devices"]
    assert [(d["job_id"], d["ranks"], d["utilization"]) for d in devices] == [
        (job_id, [0], 0.75),
        (job_id, [1], 0.75),
        (None, [], 0.75),
        (None, [], 0.75),
    ]
    assert [(job["id"], job["utilization"], job["virtual"]) for job in shown["running"]] == [(job_id, 0.75, True)]
    assert [job["user"] for job in shown["pending"]] == ["bob"]
    assert shown["counts"]["running"] == 1


def test_metrics_carry_the_names_of_dcgm_with_the_job_on_the_node_alone(head, call, supervisor):
    job_id = call.submit()
    supervisor.run(job_id)
    supervisor.post("samples", samples(job_id, 0.5, at_s=head.clock.now_s()))
    text = call("viewer", "GET", "/metrics").text
    line = next(line for line in text.splitlines() if line.startswith("DCGM_FI_DEV_GPU_UTIL{"))
    for label in (
        'gpu="0"',
        'UUID="VIRTUAL-n0-0"',
        'modelName="virtual"',
        'Hostname="here"',
        f'hpc_job="{job_id}"',
        'virtual="true"',
    ):
        assert label in line
    assert line.endswith(" 50.0")
    for name in ("FB_USED", "FB_FREE", "POWER_USAGE", "GPU_TEMP"):
        assert f"DCGM_FI_DEV_{name}{{" in text
    assert 'phalanx_jobs{state="running"} 1.0' in text
    assert "phalanx_submits_total 1.0" in text
    assert not any("hpc_job" in line for line in text.splitlines() if line.startswith("phalanx_"))


def test_exported_metrics_are_those_that_are_declared(head, call, supervisor):
    job_id = call.submit()
    supervisor.run(job_id)
    supervisor.post("samples", samples(job_id, 0.5, at_s=head.clock.now_s()))
    found = {family.name: family for family in text_string_to_metric_families(call("viewer", "GET", "/metrics").text)}
    assert found.keys() <= FAMILIES.keys()
    assert {name for name, family in FAMILIES.items() if not family.sometimes} <= found.keys()
    for name, family in found.items():
        declared = FAMILIES[name]
        assert (family.type, family.documentation) == ("counter" if declared.counter else "gauge", declared.text)
        for sample in family.samples:
            assert (sample.name, set(sample.labels)) == (declared.sample, set(declared.labels))


def test_old_samples_are_no_metrics(head, call, supervisor):
    supervisor.post("samples", samples(at_s=head.clock.now_s() - 3600))
    assert "DCGM_FI_DEV_GPU_UTIL{" not in call("viewer", "GET", "/metrics").text


def test_drain_undrain_forget(call, supervisor):
    drained = call("operator", "POST", "/v1/nodes/n0/drain", {"why": "fan", "cordon_only": True}).json()["node"]
    assert (drained["cordon"]["by"], drained["cordon"]["why"], drained["cordon"]["drain"]) == ("opal", "fan", False)
    assert call("operator", "POST", "/v1/nodes/n0/undrain").json()["node"]["cordon"] is None
    assert code(call("operator", "DELETE", "/v1/nodes/n0")) == (409, "conflict")


def test_forgetting_a_node_names_the_waiting_jobs_that_needed_it(head, call, supervisor):
    head.driver.report([SupervisorRegistered(node=replace(make_node(), id="n1"), supervisor_id="n1-life1")]).result(100)
    job_id = call("user", "POST", "/v1/jobs", {**JOB, "gpus": 8, "hold": True}).json()["job"]["id"]
    dead = NodeDied(node_id="n1", supervisor_id=None, why="no power", confirmed=True)
    head.driver.report([dead]).result(100)
    why = "8 GPUs can never fit: the fleet has 1 node, at most 4 matching GPUs on one node, 4 in total"
    assert call("operator", "DELETE", "/v1/nodes/n1").json() == {
        "impossible": [{"id": job_id, "why": why}],
        "impossible_more": 0,
    }
    shown = call("user", "GET", f"/v1/jobs/{job_id}").json()["job"]
    assert (shown["reason"], shown["detail"]) == ("never", why)


def test_labels_say_where_nodes_are(call, supervisor):
    def label(role, labels):
        return call(role, "PATCH", "/v1/nodes", {"labels": labels})

    assert [node["labels"] for node in label("operator", {"n0": {"leaf": "l0", "rack": "r1"}}).json()["nodes"]] == [
        {"leaf": "l0", "rack": "r1"}
    ]
    assert [node["labels"] for node in label("operator", {"n0": {"leaf": ""}}).json()["nodes"]] == [{"rack": "r1"}]
    assert code(label("operator", {"n0": {"rack": "r2"}, "n9": {"rack": "r2"}})) == (404, "not_found")
    assert code(label("operator", {"n0": {"two words": "r2"}})) == (400, "bad_request")
    assert code(label("user", {"n0": {"rack": "r2"}})) == (403, "not_permitted")
    assert call("viewer", "GET", "/v1/nodes/n0").json()["node"]["labels"] == {"rack": "r1"}


def test_blob_uploaded_by_a_user_reaches_the_supervisor(call, supervisor):
    content = b"a working directory" * 10_000
    digest = hashlib.sha256(content).hexdigest()
    assert call("user", "HEAD", f"/v1/blobs/{digest}").status_code == 404
    assert call("user", "PUT", f"/v1/blobs/{digest}", content=content).json() == {
        "sha256": digest,
        "bytes": len(content),
    }
    assert call("user", "HEAD", f"/v1/blobs/{digest}").status_code == 200
    assert call("node:n0", "GET", f"/v1/node/blobs/{digest}").content == content
    assert code(call("user", "PUT", f"/v1/blobs/{'0' * 64}", content=content)) == (400, "bad_request")
    assert call("user", "HEAD", f"/v1/blobs/{'0' * 64}").status_code == 404
    assert call("node:n0", "GET", "/v1/node/blobs/..%2Fsecret").status_code == 404
