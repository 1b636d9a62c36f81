"""Targets of a service, the figures of its load, and the step from these to a number of replicas."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from phalanx.core.lifecycle.load_scaling import LoadWindow
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.services.log_histogram import class_of, merged, middle_of, quantile
from phalanx.core.work.services.scale_terms import ScaleTerms, parse_scale_terms
from phalanx.core.work.services.service_load import ServiceLoad, sum_loads
from phalanx.gateway.engine_metrics import EngineMetrics, parse_cache_tokens, parse_cache_use
from phalanx.gateway.routing import RoutedReplica
from phalanx.gateway.services import ServiceTable
from tests.unit.test_services import terms

QUEUE = ScaleTerms(queue_s=2.0)


def test_keys_of_scale():
    found = parse_scale_terms({"ttft": "500ms", "queue": "2s", "kv": "80%", "in_flight": 16})
    assert found == ScaleTerms(ttft_s=0.5, queue_s=2.0, kv=0.8, in_flight=16)
    assert parse_scale_terms(found.keys()) == found
    assert parse_scale_terms(["queue=2s", "idle=1h"]) == ScaleTerms(queue_s=2.0, idle_s=3600.0)
    assert terms(replicas="0..4", scale={"queue": "2s"}).scale == QUEUE
    assert terms(replicas="0..4", scale={}).scale is None


BAD = [
    ({"latency": "2s"}, "'latency' is not one of ttft, queue, kv, in_flight, idle"),
    ({"ttft": "5"}, "'5' has no unit"),
    ({"ttft": "1ms"}, "is not from 10ms to 1h"),
    ({"queue": "2 parsecs"}, "is not a duration"),
    ({"queue": "9" * 400 + "s"}, "has no unit"),
    ({"kv": "0.8"}, "'0.8' is not from 1% to 100%"),
    ({"kv": "120%"}, "'120%' is not"),
    ({"in_flight": 0}, "'0' is not a number from 1"),
    ({"in_flight": "٣"}, "is not a number"),
    ({"in_flight": True}, "'true' is not a number"),
    ({"idle": "1s"}, "is not from 10s to"),
    ("2s", "expected names with targets"),
    (["queue"], "'' is not a duration"),
]


@pytest.mark.parametrize(("value", "said"), BAD, ids=lambda one: str(one)[:30])
def test_wrong_targets_are_named(value, said):
    with pytest.raises(InvalidKey) as refused:
        terms(replicas="0..4", scale=value)
    assert said in refused.value.message
    assert refused.value.key == "scale"


def test_a_fixed_number_cannot_follow_load():
    with pytest.raises(InvalidKey, match="leaves no choice"):
        terms(replicas=2, scale={"queue": "2s"})


def test_histograms_add_up_and_their_quantiles_are_near():
    figures = [0.002 * 1.01**number for number in range(900)]
    parts = [merged({class_of(one): 1} for one in figures[start::2]) for start in (0, 1)]
    whole = merged(parts)
    assert sum(whole.values()) == 900
    for share in (0.1, 0.5, 0.9):
        assert quantile(whole, share) == pytest.approx(figures[int(share * 900)], rel=0.06)
    assert quantile({}, 0.9) == 0.0
    assert class_of(0.0) == class_of(-5.0) == 0
    assert class_of(1e30) == class_of(1e9)
    assert all(class_of(middle_of(number)) == number for number in range(1, 169))


class Clock:
    """A window that gets figures once a second."""

    def __init__(self, scale, *, low=1):
        self.scale, self.window, self.now_s, self.low = scale, LoadWindow(), 1000.0, low

    def see(self, seconds=1, *, ready=1, wanted=1, **load):
        """The first decision within some seconds of one load."""
        for _ in range(seconds):
            self.now_s += 1.0
            found = self.window.decide(
                self.scale, ServiceLoad(**load), self.now_s, ready=ready, wanted=wanted, may_be_zero=self.low == 0
            )
            if found is not None:
                return found
        return None


def test_a_wait_counts_only_since_the_number_of_replicas_changed():
    clock = Clock(QUEUE)
    assert clock.see(60, in_flight=3) is None
    found = clock.see(in_flight=4, waiting=2, oldest_wait_s=2.4)
    assert (found.replicas, found.why) == (2, "2.4s queue wait at 1 replica")
    assert clock.see(30, wanted=2, in_flight=4, waiting=9, oldest_wait_s=30.0) is None, "one is on its way"
    assert clock.see(wanted=2, ready=2, in_flight=8, waiting=9, oldest_wait_s=31.0) is None, "it has just come"
    found = clock.see(5, wanted=2, ready=2, in_flight=8, waiting=9, oldest_wait_s=33.0)
    assert (found.replicas, found.why) == (3, "2.0s queue wait at 2 replicas")


def test_growth_is_bounded_by_the_ready_replicas():
    clock = Clock(QUEUE)
    clock.see(60, ready=3, wanted=3, in_flight=3)
    assert clock.see(ready=3, wanted=3, waiting=500, oldest_wait_s=50.0).replicas == 6


def test_streams_without_a_token_count_before_it_comes():
    clock = Clock(ScaleTerms(ttft_s=0.5))
    assert clock.see(30, in_flight=4, first_tokens={class_of(0.2): 5}) is None
    assert clock.see(in_flight=4, unanswered={class_of(3.0): 2}) is None, "two are noise"
    found = clock.see(in_flight=12, unanswered={class_of(1.0): 9})
    assert found.replicas == 2
    assert found.why.endswith("to the first token at 1 replica")


def test_proportional_targets():
    assert Clock(ScaleTerms(in_flight=8)).see(in_flight=20, waiting=5).replicas == 4
    found = Clock(ScaleTerms(kv=0.8)).see(ready=2, wanted=2, in_flight=9, kv=0.95)
    assert (found.replicas, found.why) == (3, "95% of the KV cache in use at 2 replicas")


def test_first_replica_and_the_last():
    clock = Clock(ScaleTerms(queue_s=2.0, idle_s=60.0), low=0)
    assert clock.see(90, ready=0, wanted=0) is None
    found = clock.see(ready=0, wanted=0, waiting=1)
    assert (found.replicas, found.why) == (1, "a request waits for the first replica")
    assert clock.see(59, ready=1, wanted=1) is None
    found = clock.see(2, ready=1, wanted=1)
    assert (found.replicas, found.why) == (0, "no request for 1m00s")


def test_one_replica_fewer_is_tried_where_no_target_was_missed():
    clock = Clock(QUEUE)
    assert clock.see(600, ready=3, wanted=3, in_flight=4) is None
    assert clock.see(2, ready=3, wanted=3, in_flight=4).replicas == 2
    assert clock.see(598, ready=2, wanted=2, in_flight=4) is None


def test_fewer_only_as_far_as_a_replica_was_seen_to_go():
    clock = Clock(QUEUE)
    clock.see(60, in_flight=3)
    assert clock.see(in_flight=10, waiting=3, oldest_wait_s=3.0).replicas == 2  # 10 are too many for one
    assert clock.see(1200, ready=2, wanted=2, in_flight=9) is None, "9 of 10 leave nothing free"
    assert clock.see(610, ready=2, wanted=2, in_flight=7).replicas == 1


def test_a_wait_while_too_many_are_in_flight_teaches_nothing():
    clock = Clock(ScaleTerms(queue_s=2.0, in_flight=14))
    clock.see(60, ready=2, wanted=2, in_flight=20)
    found = clock.see(ready=2, wanted=2, in_flight=32, waiting=8, oldest_wait_s=9.0)
    assert (found.replicas, found.why) == (3, "40 requests, 14 for each replica"), "not twice as many"
    assert clock.see(599, ready=3, wanted=3, in_flight=28) is None
    assert clock.see(2, ready=3, wanted=3, in_flight=28).replicas == 2, "14 each, as the target says, and no fifth less"


def test_a_wait_below_the_number_in_flight_asks_for_more_and_is_remembered():
    clock = Clock(ScaleTerms(queue_s=2.0, in_flight=14))
    clock.see(60, ready=2, wanted=2, in_flight=20)
    found = clock.see(ready=2, wanted=2, in_flight=20, waiting=4, oldest_wait_s=3.0)
    assert (found.replicas, found.why) == (3, "3.0s queue wait at 2 replicas")
    assert clock.see(1200, ready=3, wanted=3, in_flight=20) is None, "10 each were too many: 8 are planned with"


def test_missing_figures_begin_the_ten_minutes_again():
    clock = Clock(QUEUE)
    clock.see(590, ready=3, wanted=3)
    clock.now_s += 60.0
    assert clock.see(590, ready=3, wanted=3) is None
    assert clock.see(20, ready=3, wanted=3).replicas == 1


def test_loads_of_several_gateways_add_up():
    one = ServiceLoad(in_flight=3, waiting=1, oldest_wait_s=1.0, arrived=5, first_tokens={4: 1}, kv=0.5)
    both = sum_loads([one, ServiceLoad(in_flight=2, oldest_wait_s=4.0, first_tokens={4: 2, 5: 1}, kv=0.7)])
    assert (both.in_flight, both.waiting, both.oldest_wait_s, both.arrived, both.kv) == (5, 1, 4.0, 5, 0.7)
    assert both.first_tokens == {4: 3, 5: 1}
    assert sum_loads([]) == ServiceLoad()


def test_kv_use_is_read_from_metrics_that_come_in_many_parts():
    async def check():
        metrics = b"# a comment\n" * 50_000 + b"vllm:kv_cache_usage_perc{} 0.5\n"
        app = web.Application()

        async def scrape(_request):
            return web.Response(body=metrics)

        app.router.add_get("/metrics", scrape)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        replica = RoutedReplica(job_id="1", url=f"http://127.0.0.1:{runner.addresses[0][1]}", slot=0, limit=1)
        try:
            async with aiohttp.ClientSession() as session:
                await EngineMetrics(ServiceTable(replica_limit=1, waiting_max=1))._read_one(session, replica)
        finally:
            await runner.cleanup()
        assert replica.cache_use == 0.5

    asyncio.run(check())


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (
            b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n',
            0.75,
        ),
        (b"# HELP sglang:token_usage x\nsglang:token_usage 0.5\n", 0.5),
        (b"llamacpp:kv_cache_usage_ratio 7\n", 1.0),
        (b"other 1\n", None),
        (b"", None),
    ],
)
def test_kv_use_of_engines(text, share):
    assert parse_cache_use(text) == share
    with pytest.raises(ValueError, match="float"):
        parse_cache_use(b"sglang:token_usage e-e\n")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (
            b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="2048",num_gpu_blocks_override="None"} 1.0\n',
            32768,
        ),
        (b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n', 0),
        (b'sglang:max_total_num_tokens{model_name="m"} 9000.0\nsglang:max_total_num_tokens 8000\n', 8000),
        (b"", 0),
    ],
)
def test_size_of_the_kv_cache_of_engines(text, tokens):
    assert parse_cache_tokens(text) == tokens
