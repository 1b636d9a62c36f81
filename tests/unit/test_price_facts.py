"""`phalanx prices offers`: facts of prices with their source and age."""

from datetime import date

import pytest

from phalanx.cli.report.price_facts import offer_facts
from phalanx.core.errors import NotFound
from phalanx.planner.facts.instances import parse_instance_table
from phalanx.planner.facts.prices import parse_price_table

PRICES = parse_price_table(
    "offer,gpu,kind,region,usd_per_gpu_hour,note,source,date\n"
    "AWS p5.48xlarge,h100,on-demand,us-east-1,6.88,,price API,2026-11-09\n"
    "Lambda 8x,h100,on-demand,,3.99,,page,2026-09\n"
    "Old,t4,spot,,0.1,,memory,2025\n",
    "prices.csv",
)
INSTANCES = parse_instance_table(
    "name,cloud,gpu,gpus,network_gbit_per_gpu,network_kind,storage_gb_per_s,note,source,date\n"
    "p5.48xlarge,AWS,h100,8,400,efa,10,,page,2026-08\n",
    "instances.csv",
)
TODAY = date(2026, 11, 19)


def test_a_fact_has_its_server_source_and_age():
    (one,) = offer_facts("P5", PRICES, INSTANCES, TODAY)
    assert (one.offer, one.gpus, one.gbit_per_gpu, one.usd_per_gpu_hour) == ("AWS p5.48xlarge", 8, 400.0, 6.88)
    assert (one.age_days, one.source) == (10, "price API")


def test_a_date_without_a_day_is_as_old_as_it_can_be_and_a_server_may_be_unknown():
    found = {one.offer: one for one in offer_facts("", PRICES, INSTANCES, TODAY)}
    assert (found["Lambda 8x"].age_days, found["Lambda 8x"].gpus) == (79, 0)
    assert found["Old"].age_days == (TODAY - date(2025, 1, 1)).days


def test_what_no_fact_has_is_said():
    with pytest.raises(NotFound, match="no fact has the price of 'mi300'"):
        offer_facts("mi300", PRICES, INSTANCES, TODAY)
