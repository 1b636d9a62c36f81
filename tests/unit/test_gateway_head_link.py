"""The gateway's connection to heads: pages of the list, standbys, keys, and a token that is not to be found."""

import asyncio
import contextlib
import json

import msgspec
import pytest
from aiohttp import web

from phalanx.core.errors import Unreachable
from phalanx.gateway.head_link import GatewayHead, HeadAway, HeadLink
from phalanx.gateway.services import ServiceTable
from phalanx.wire.api.services import ServiceView

NAMES = [f"s{number}" for number in range(7)]


def service_record(name):
    """The JSON of one service."""
    return {
        "name": name,
        "state": "ready",
        "user": "ada",
        "project": "p",
        "queue": "q",
        "created_s": 1.0,
        "revision": 1,
        "served_revision": 1,
        "replicas": "0..4",
        "desired": 1,
        "ready": 1,
    }


class Heads:
    """A standby, and a leader that answers three services at a time."""

    def __init__(self):
        self.asked_keys = []
        self.urls = []
        self.without_token = False
        self.changes = []

    async def standby(self, _request):
        return web.json_response({"error": {"code": "not_leading"}}, status=503)

    async def services(self, request):
        left = [name for name in NAMES if name > request.query.get("after", "")]
        page = [service_record(name) for name in left[:3]]
        return web.json_response({"services": page, "next": left[2] if len(left) > 3 else ""})

    async def me(self, request):
        key = request.headers["Authorization"].removeprefix("Bearer ")
        self.asked_keys.append(key)
        if not key.startswith("good"):
            return web.json_response({"error": {}}, status=401)
        me = {"user": key, "role": "user", "token_id": "t", "projects": ["p"], "actions": ["submit"]}
        return web.json_response(me)

    async def change(self, request):
        self.changes.append((request.match_info["name"], await request.json()))
        return web.json_response({})

    def headers(self):
        if self.without_token:
            raise Unreachable("no token")
        return {"Authorization": "Bearer gateway"}

    def failed(self, url):
        if self.urls[0] == url:
            self.urls.append(self.urls.pop(0))

    @contextlib.asynccontextmanager
    async def linked(self, snapshot=""):
        """A link that follows them, with its table."""
        standby, leader = web.Application(), web.Application()
        standby.router.add_get("/{any:.*}", self.standby)
        leader.router.add_get("/v1/services", self.services)
        leader.router.add_get("/v1/me", self.me)
        leader.router.add_patch("/v1/services/{name}", self.change)
        runners = []
        for app in (standby, leader):
            runners.append(web.AppRunner(app, access_log=None))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
            self.urls.append(f"http://127.0.0.1:{runners[-1].addresses[0][1]}")
        table = ServiceTable(replica_limit=1, waiting_max=1)
        head = GatewayHead(url=lambda: self.urls[0], headers=self.headers, failed=self.failed)
        link = HeadLink(head, table, snapshot)
        following = asyncio.create_task(link.run())
        try:
            yield link, table
        finally:
            following.cancel()
            for runner in runners:
                await runner.cleanup()


async def until(true):
    for _ in range(3000):
        if true():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never came")


def test_all_pages_of_the_list_are_read_from_the_head_that_leads(tmp_path):
    async def check():
        heads = Heads()
        snapshot = tmp_path / "list.json"
        async with heads.linked(str(snapshot)) as (link, table):
            await until(lambda: set(table.services) == set(NAMES))
            assert link.away_s < 60
        assert {one["name"] for one in json.loads(snapshot.read_text())["services"]} == set(NAMES)

    asyncio.run(check())


@pytest.mark.parametrize(("replicas", "asked"), [("0..4", 1), ("1", 1), ("2..3", 2), ("5", 5)])
def test_first_replicas_asked_for_are_in_the_range_of_the_service(replicas, asked):
    async def check():
        heads = Heads()
        async with heads.linked() as (link, table):
            await until(lambda: set(table.services) == set(NAMES))
            view = msgspec.convert({**service_record("s0"), "replicas": replicas, "desired": 0}, ServiceView)
            service = table.services["s0"]
            service.view = view
            await link.want_replica(service)
            assert heads.changes == [("s0", {"replicas": asked})]

    asyncio.run(check())


def logged(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "phalanx.gateway"]


def test_a_token_that_is_missing_for_a_moment_ends_nothing_and_is_logged_once(caplog):
    async def check():
        heads = Heads()
        heads.without_token = True
        async with heads.linked() as (_, table):
            await until(lambda: logged(caplog))
            assert not table.services
            heads.without_token = False
            await until(lambda: len(table.services) == len(NAMES))
        away, back = logged(caplog)
        assert away.startswith("No list of services from the head: no token. ")
        assert back == "The head answers again."

    asyncio.run(check())


def test_wrong_keys_are_asked_for_once_and_displace_no_good_one():
    async def check():
        heads = Heads()
        async with heads.linked() as (link, table):
            await until(lambda: len(table.services) == len(NAMES))
            for _ in range(3):
                assert (await link.owner_of("good-ada")).user == "good-ada"
                assert await link.owner_of("wrong") is None
            assert sorted(heads.asked_keys) == ["good-ada", "wrong"]
            heads.urls[:] = heads.urls[1:]  # the standby alone
            assert (await link.owner_of("good-ada")).user == "good-ada"
            with pytest.raises(HeadAway):
                await link.owner_of("good-eve")

    asyncio.run(check())


def test_requests_with_one_unknown_key_that_come_together_ask_the_head_once():
    async def check():
        heads = Heads()
        async with heads.linked() as (link, table):
            await until(lambda: len(table.services) == len(NAMES))
            asking = [asyncio.create_task(link.owner_of("good-ada")) for _ in range(200)]
            await asyncio.sleep(0)
            asking[0].cancel()  # the client that came first leaves
            users = await asyncio.gather(*asking[1:])
            assert {user.user for user in users} == {"good-ada"}
            assert heads.asked_keys == ["good-ada"]

    asyncio.run(check())
