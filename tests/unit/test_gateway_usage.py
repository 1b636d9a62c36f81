"""The use of services: counted by hour, on the disk until it is counted, and counted once."""

# mypy: disable-error-code="arg-type, var-annotated"

import asyncio

import msgspec
import pytest

from phalanx.core.work.services.service_use import ReplicaUse, ServiceUseHour
from phalanx.gateway.head_link import HeadAway
from phalanx.gateway.services import ServiceTable
from phalanx.gateway.usage_link import UsageLink
from phalanx.gateway.usage_meter import HOUR_MS, UsageMeter, request_use
from phalanx.gateway.usage_spool import UsageSpool, orphaned_spools
from phalanx.wire.api.gateways import UsageReport

HOUR = ServiceUseHour(id="7200", replicas=(ReplicaUse(service="chat", job="1", busy=5),))


def one_request(prompt=100, answer=20):
    return request_use("chat", "nlp", "ann", prompt=prompt, answer=answer, estimated=False, stream_ms=1000)


def test_requests_that_overlap_make_a_replica_busy_once_and_hours_are_divided():
    meter = UsageMeter()
    meter.begin("chat", "1", HOUR_MS - 400)
    meter.begin("chat", "1", HOUR_MS - 300)
    meter.end("chat", "1", HOUR_MS - 100)
    first, second = meter.take([], HOUR_MS + 50)
    assert [(one.id, one.replicas[0].busy) for one in (first, second)] == [("0", 400), ("3600", 50)]
    meter.end("chat", "1", HOUR_MS + 70)
    meter.add(one_request(), HOUR_MS + 70)
    meter.add(one_request(), HOUR_MS + 80)
    (later,) = meter.take([("chat", "1"), ("chat", "2")], HOUR_MS + 100)
    assert [(one.job, one.busy) for one in later.replicas] == [("1", 20), ("2", 0)]
    (use,) = later.uses
    assert (use.requests, use.prompt_tokens, use.answer_tokens, use.kv_token_ms) == (2, 200, 40, 220_000)
    assert meter.take([("chat", "1"), ("chat", "2")], HOUR_MS + 200) == []


def test_a_report_is_on_the_disk_until_it_is_counted_and_a_cut_line_is_none(tmp_path):
    path = tmp_path / ("a" * 32 + ".jsonl")
    spool = UsageSpool(str(path))
    spool.add(UsageReport(sequence=1, hours=[HOUR]))
    spool.add(UsageReport(sequence=1, hours=[HOUR]))
    assert orphaned_spools(str(tmp_path)) == [], "while its gateway runs, no other takes it"
    with path.open("ab") as file:
        file.write(b'{"sequence":3,"hours":[{"id":"72')
    spool.add(UsageReport(sequence=1, hours=[HOUR]))
    spool.close()
    (found,) = orphaned_spools(str(tmp_path))
    assert [one.sequence for one in found.waiting] == [1, 2, 3]
    assert found.gateway_id == "a" * 32
    found.counted(3)
    found.close()
    assert not path.exists()


class CountingHead:
    """A head that counts reports once. While `loses`, it counts and its answers are lost; while `away`, nothing arrives."""

    def __init__(self):
        self.sequences, self.requests = {}, 0
        self.away = self.loses = False

    async def ask_own(self, method, path, body):
        if self.away:
            raise HeadAway
        gateway, report = path.split("/")[3], msgspec.json.decode(body, type=UsageReport)
        if report.sequence > self.sequences.get(gateway, 0):
            self.sequences[gateway] = report.sequence
            self.requests += sum(use.requests for hour in report.hours for use in hour.uses)
        if self.loses:
            raise HeadAway
        return 200, msgspec.json.encode({"sequence": self.sequences[gateway]})


def test_use_is_counted_once_through_lost_answers_a_crash_and_another_gateway(tmp_path):
    async def check():
        head, table = CountingHead(), ServiceTable(replica_limit=1, waiting_max=1)

        async def running():
            meter = UsageMeter()
            link = UsageLink(head, table, meter, str(tmp_path))
            task = asyncio.create_task(link.run())
            for _ in range(20):
                await asyncio.sleep(0)
            assert link._own is not None
            return meter, link, task

        async def killed(link, task):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            spool = link._own
            spool.waiting = spool.waiting or [UsageReport(sequence=1, hours=[])]  # the file stays, as after a crash
            spool.close()

        head.loses = True
        meter, link, task = await running()
        for _ in range(3):
            meter.add(one_request(), 1000)
            await link.store()
            with pytest.raises(HeadAway):
                await link._send_all()
        assert head.requests == 1, "the first one was counted, and its answer lost"
        head.loses, head.away = False, True
        meter.add(one_request(), 2000)
        await link.store()
        await killed(link, task)
        head.away = False
        meter, link, task = await running()
        assert head.requests == 4, "the next gateway has sent them, and the first one was not counted again"
        meter.add(one_request(), 3000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await link.close()
        assert head.requests == 5
        assert list(tmp_path.iterdir()) == [], "nothing is left to report"

    asyncio.run(check())
