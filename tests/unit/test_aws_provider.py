"""The provider `aws` without a cloud: what it asks EC2 for, and what EC2's answers mean. `benchmarks.clouds` has it call moto's server."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import ast
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.app.rented_machine import MachineLease
from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import ChargedMachine, ListedMachine
from phalanx.planner.facts.instances import read_instances
from phalanx.planner.facts.prices import read_prices
from phalanx.ports.engine import MachineJoin
from phalanx.ports.provider import CallUnanswered, NodeOrder, OfferRefused, PoolTerms, StartedMachine
from phalanx.providers.aws import ec2
from phalanx.providers.aws.pool_terms import full_zones, known_price, make_offers, parse_terms
from phalanx.providers.aws.provider import AwsProvider
from phalanx.providers.aws.rights import least_policy

SETTINGS = {"region": "us-east-1", "image": "ami-1"}
FACTS = (read_instances(), read_prices())
AT = datetime(2026, 11, 28, 17, 0, tzinfo=UTC)
OFFER = "us-east-1a p5.48xlarge spot"


def error(code, status=400, message="no"):
    return ec2._of_answer({"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}})


class Cloud:
    """Answers of EC2 by operation: a value, an error, or a list of those in turn."""

    def __init__(self, monkeypatch, **answers):
        self.answers, self.calls = answers, []
        monkeypatch.setattr(ec2, "call", self.call)

    def call(self, account, operation, **arguments):
        self.calls.append((operation, arguments))
        answer = self.answers[operation]
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def of(self, operation):
        return [arguments for name, arguments in self.calls if name == operation]


def provider(listens=True):
    return AwsProvider(
        head=SimpleNamespace(
            derive_id=lambda purpose: "0123456789abcdef" * 4,
            machine_join=(lambda node, order: MachineJoin(address="h:1", token=f"t-{order}", fingerprint="f"))
            if listens
            else None,
        )
    )


def order(**fields):
    settings = {**SETTINGS, **fields.pop("settings", {})}
    return NodeOrder(
        **{"node_id": "p-0", "token": "p-0-k", "template": "p5.48xlarge", "pool": "p", "offer": OFFER} | fields,
        settings=settings,
    )


def instance(name="i-1", state="pending", reason="", **tags):
    listed = [{"Key": f"phalanx-{key}", "Value": value} for key, value in tags.items()]
    return {
        "InstanceId": name,
        "State": {"Name": state},
        "LaunchTime": AT,
        "StateTransitionReason": reason,
        "Tags": listed,
    }


def listed(*instances):
    return {"Reservations": [{"Instances": list(instances)}]}


# ---- terms and offers --------------------------------------------------------------------------------------------------


def test_offers_are_in_order_of_price_and_a_reservation_costs_what_its_kind_does():
    terms = parse_terms({**SETTINGS, "market": "on-demand,block:cr-0a"})
    offers = make_offers(terms, ["p5.48xlarge"], ["us-east-1b", "us-east-1a"], None, FACTS)
    assert [(offer.text.split(" ", 1)[0], offer.text.rpartition(" ")[2]) for offer in offers] == [
        ("us-east-1b", "block:cr-0a"),
        ("us-east-1a", "block:cr-0a"),
        ("us-east-1b", "on-demand"),
        ("us-east-1a", "on-demand"),
    ]
    assert [offer.price_per_h for offer in offers] == [39.328, 39.328, 55.04, 55.04]


def test_the_price_of_the_region_counts_before_a_newer_one_elsewhere_and_an_unknown_one_is_zero():
    assert known_price("p5.48xlarge", "on-demand", "us-east-1", FACTS) == 55.04
    assert known_price("p5.48xlarge", "on-demand", "eu-north-1", FACTS) == 55.04  # of another region
    assert known_price("p5.48xlarge", "spot", "us-east-1", FACTS) == 0.0
    assert known_price("t3.micro", "on-demand", "us-east-1", FACTS) == 0.0
    with pytest.raises(BadRequest, match=r"price of us-east-1a p5\.48xlarge spot is not known"):
        make_offers(parse_terms({**SETTINGS, "market": "spot,on-demand"}), ["p5.48xlarge"], ["us-east-1a"], None, FACTS)


def test_zones_may_be_letters_and_never_of_another_region():
    assert full_zones(["b", "us-east-1a", "b"], "us-east-1") == ("us-east-1b", "us-east-1a")
    for zone in ("us-west-2a", "B", "1", "us-east-1"):
        with pytest.raises(BadRequest, match="is not a zone of region us-east-1"):
            full_zones([zone], "us-east-1")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"region": ""}, "the region is missing"),
        ({"region": "mars"}, "'mars' is not a region"),
        ({"image": "ubuntu"}, "the image is missing"),
        ({"colour": "red"}, "no setting colour"),
        ({"market": "stolen"}, "market 'stolen'"),
        ({"efa": "33"}, "the setting efa"),
        ({"silence": "10s"}, "less than 60 s"),
        ({"credentials": "any"}, "neither files nor instance"),
        ({"endpoint": "ftp://x"}, "is not a URL"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(settings, words):
    with pytest.raises(BadRequest) as caught:
        parse_terms({**SETTINGS, **settings})
    assert words in str(caught.value)


# ---- calls -------------------------------------------------------------------------------------------------------------


def test_a_start_has_the_token_of_order_and_offer_tags_and_an_end_of_its_own(monkeypatch):
    cloud = Cloud(monkeypatch, run_instances={"Instances": [instance()]})
    one = provider()
    assert one.start(order()) == StartedMachine(machine="i-1", since_s=AT.timestamp())
    one.start(order())
    one.start(order(offer="us-east-1b p5.48xlarge spot"))
    first, again, elsewhere = cloud.of("run_instances")
    assert first == again
    assert len(first["ClientToken"]) == 64
    assert first["ClientToken"] != elsewhere["ClientToken"]
    tags = {tag["Key"]: tag["Value"] for tag in first["TagSpecifications"][0]["Tags"]}
    assert tags == {
        "Name": "p-0",
        "phalanx-owner": "0123456789abcdef",
        "phalanx-pool": "p",
        "phalanx-node": "p-0",
        "phalanx-token": "p-0-k",
        "phalanx-offer": OFFER,
        "phalanx-silence": "1800",
    }
    assert first["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert first["InstanceMarketOptions"]["SpotOptions"]["SpotInstanceType"] == "one-time"
    assert first["Placement"] == {"AvailabilityZone": "us-east-1a"}
    lines = first["UserData"].splitlines()
    assert lines[0] == "#!/bin/sh"
    assert lines[-1] == "exec shutdown -h now"
    assert "--head h:1 --fingerprint f --name p-0 --silence 1800" in first["UserData"]


def test_reservations_placement_groups_roles_and_efa_are_asked_for(monkeypatch):
    subnets = {"Subnets": [{"SubnetId": "subnet-a", "AvailabilityZone": "us-east-1a"}]}
    cloud = Cloud(monkeypatch, run_instances={"Instances": [instance()]}, describe_subnets=subnets)
    settings = {
        "subnets": "subnet-a",
        "security-groups": "sg-1,sg-2",
        "placement-group": "pg",
        "efa": "3",
        "instance-profile": "node",
    }
    provider().start(order(offer="us-east-1a p5.48xlarge block:cr-0a", settings=settings))
    asked = cloud.of("run_instances")[0]
    assert asked["Placement"]["GroupName"] == "pg"
    assert asked["IamInstanceProfile"] == {"Name": "node"}
    assert asked["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    target = asked["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": "cr-0a"}
    cards = asked["NetworkInterfaces"]
    assert [(one["NetworkCardIndex"], one["DeviceIndex"], one["InterfaceType"]) for one in cards] == [
        (0, 0, "efa"),
        (1, 1, "efa-only"),
        (2, 1, "efa-only"),
    ]
    assert all((one["SubnetId"], one["Groups"]) == ("subnet-a", ["sg-1", "sg-2"]) for one in cards)
    assert "SubnetId" not in asked


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("InsufficientInstanceCapacity", 500, OfferRefused),
        ("VcpuLimitExceeded", 400, OfferRefused),
        ("MaxSpotInstanceCountExceeded", 400, OfferRefused),
        ("RequestLimitExceeded", 503, CallUnanswered),
        ("InternalError", 500, CallUnanswered),
        ("Whatever", 502, CallUnanswered),
        ("UnauthorizedOperation", 403, ec2.Ec2Error),
        ("InvalidParameterValue", 400, ec2.Ec2Error),
    ],
)
def test_what_an_error_of_ec2_means(code, status, kind):
    found = error(code, status, "a\n b  Encoded authorization failure message: abc\ndef")
    assert type(found) is kind
    assert str(found) == f"{code}: a b"


def test_a_token_that_was_used_with_other_words_gives_the_instance_that_it_started(monkeypatch):
    known = [listed(), listed(instance("i-7"))]
    cloud = Cloud(monkeypatch, run_instances=error("IdempotentParameterMismatch"), describe_instances=known)
    with pytest.raises(CallUnanswered, match="does not list its instance yet"):
        provider().start(order())
    assert provider().start(order()).machine == "i-7"
    filters = {one["Name"]: one["Values"] for one in cloud.of("describe_instances")[0]["Filters"]}
    assert filters["client-token"] == [cloud.of("run_instances")[0]["ClientToken"]]


def test_an_instance_that_has_ended_is_no_start(monkeypatch):
    Cloud(monkeypatch, run_instances={"Instances": [instance(state="terminated")]})
    with pytest.raises(OSError, match="i-1 has ended"):
        provider().start(order())


def test_a_stop_ends_all_instances_of_the_order_and_those_that_only_the_record_knows(monkeypatch):
    ended = instance("i-1", "shutting-down", "User initiated (2026-11-28 17:05:00 GMT)")
    cloud = Cloud(
        monkeypatch, describe_instances=[listed(instance("i-1", token="p-0-k")), listed(ended)], terminate_instances={}
    )
    stopped = provider().stop(order(known_machine="i-2"))
    assert cloud.of("terminate_instances") == [{"InstanceIds": ["i-1", "i-2"]}]
    assert stopped[0] == ChargedMachine(machine="i-1", since_s=AT.timestamp(), until_s=AT.timestamp() + 300.0)
    assert (stopped[1].machine, stopped[1].since_s) == ("i-2", 0.0)  # ended; the list lags behind
    assert stopped[1].until_s > 0.0


def test_orders_that_are_given_up_share_a_list_but_none_from_before_the_own_start(monkeypatch):
    cloud = Cloud(
        monkeypatch, describe_instances=[listed(), listed(instance("i-9", token="p-0-k"))], terminate_instances={}
    )
    cloud.answers["run_instances"] = CallUnanswered("timed out")
    clouds = provider()
    assert [clouds.stop(order(token=f"p-{number}-k")) for number in range(1, 50)] == [[]] * 49
    assert len(cloud.of("describe_instances")) == 1
    with pytest.raises(CallUnanswered):
        clouds.start(order())
    cloud.answers["describe_instances"].append(listed(instance("i-9", "terminated", token="p-0-k")))
    assert [one.machine for one in clouds.stop(order())] == ["i-9"]  # of a list that began after the call
    assert cloud.of("terminate_instances") == [{"InstanceIds": ["i-9"]}]


def test_a_stop_of_what_ec2_does_not_know_is_done_and_of_one_stray_leaves_the_others(monkeypatch):
    cloud = Cloud(monkeypatch, describe_instances=listed(), terminate_instances=error("InvalidInstanceID.NotFound"))
    assert provider().stop(order()) == []
    assert provider().stop(order(machine="i-9")) == []
    assert cloud.of("terminate_instances") == [{"InstanceIds": ["i-9"]}]
    cloud.answers["terminate_instances"] = error("UnauthorizedOperation", 403)
    with pytest.raises(OSError, match="UnauthorizedOperation"):
        provider().stop(order(machine="i-9"))


def test_the_end_of_a_head_ends_its_instances_by_one_call_and_with_running_jobs_none(monkeypatch):
    started = {"Instances": [instance("i-new")]}
    left = listed(instance("i-1"), instance("i-2"), instance("i-over", "terminated"))
    cloud = Cloud(monkeypatch, run_instances=started, describe_instances=[left, listed()], terminate_instances={})
    one = provider()
    one.open([order(), order(token="p-1-k", known_machine="i-2")])
    one.start(order(token="p-2-k"))  # the list does not have it yet
    one.close(keep_nodes=True)
    assert cloud.of("terminate_instances") == []
    one.close(keep_nodes=False)
    assert cloud.of("terminate_instances") == [{"InstanceIds": ["i-1", "i-2", "i-new"]}]


def test_the_list_is_that_of_the_owner_of_all_pages(monkeypatch):
    one = instance("i-1", "running", node="p-0", token="p-0-k", offer=OFFER)
    pages = [{**listed(one), "NextToken": "more"}, listed(instance("i-2", "terminated", node="p-1", token="x"))]
    cloud = Cloud(monkeypatch, describe_instances=pages)
    assert provider().machines(SETTINGS) == [
        ListedMachine(machine="i-1", node_id="p-0", token="p-0-k", offer=OFFER),
        ListedMachine(machine="i-2", node_id="p-1", token="x", ended=True),
    ]
    first, second = cloud.of("describe_instances")
    assert {"Name": "tag:phalanx-owner", "Values": ["0123456789abcdef"]} in first["Filters"]
    assert second["NextToken"] == "more"


# ---- adding a pool, and rights -----------------------------------------------------------------------------------------

TYPE = {"InstanceType": "p5.48xlarge", "VCpuInfo": {"DefaultVCpus": 192}, "MemoryInfo": {"SizeInMiB": 2 << 20}}
GOOD = {
    "describe_availability_zones": {"AvailabilityZones": [{"ZoneName": f"us-east-1{letter}"} for letter in "ba"]},
    "describe_instance_types": {"InstanceTypes": [TYPE]},
    "describe_instances": listed(),
    "run_instances": error("DryRunOperation", 412),
}


def test_a_pool_is_tried_as_a_dry_run_and_has_an_offer_for_each_zone(monkeypatch):
    cloud = Cloud(monkeypatch, **GOOD)
    made = provider().offer(PoolTerms(template="p5.48xlarge", settings=SETTINGS))
    assert [offer.text for offer in made.offers] == [f"us-east-1{zone} p5.48xlarge on-demand" for zone in "ab"]
    assert (len(made.devices), made.devices[0].model, made.cpus, made.listed) == (8, "h100-sxm5-80gb", 192, True)
    assert [asked["DryRun"] for asked in cloud.of("run_instances")] == [True]


@pytest.mark.parametrize(
    ("answers", "zones", "words"),
    [
        (
            {"describe_availability_zones": error("AuthFailure", 401, "bad keys")},
            (),
            "AWS does not accept the credentials: AuthFailure: bad keys",
        ),
        (
            {"run_instances": error("UnauthorizedOperation", 403, "none")},
            (),
            "AWS refuses: UnauthorizedOperation: none",
        ),
        ({"describe_instance_types": error("InvalidInstanceType", 400, "p9")}, (), "InvalidInstanceType: p9"),
        ({}, ("z",), "region us-east-1 has no zone us-east-1z"),
    ],
)
def test_what_ec2_refuses_is_one_line_and_no_pool(monkeypatch, answers, zones, words):
    cloud = Cloud(monkeypatch, **{**GOOD, **answers})
    with pytest.raises(BadRequest) as caught:
        provider().offer(PoolTerms(template="p5.48xlarge", zones=zones, settings=SETTINGS))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(asked["DryRun"] for asked in cloud.of("run_instances"))


def test_rights_are_tried_by_dry_runs_and_the_policy_ends_only_machines_of_this_head(monkeypatch):
    cloud = Cloud(
        monkeypatch,
        describe_availability_zones=error("DryRunOperation", 412),
        describe_instance_types=error("DryRunOperation", 412),
        describe_instances=error("UnauthorizedOperation", 403),
        describe_subnets=error("InvalidSubnetID.NotFound"),
        get_console_output=error("UnauthorizedOperation", 403, "none"),
        terminate_instances=error("InvalidInstanceID.NotFound"),
        run_instances=error("DryRunOperation", 412),
    )
    found = provider().check(SETTINGS)
    assert {one.name: one.allowed for one in found.rights} == {
        "ec2:DescribeAvailabilityZones": True,
        "ec2:DescribeInstanceTypes": True,
        "ec2:DescribeInstances": False,
        "ec2:DescribeSubnets": True,
        "ec2:GetConsoleOutput": False,
        "ec2:TerminateInstances": True,
        "ec2:RunInstances": True,
    }
    assert all(arguments["DryRun"] for _, arguments in cloud.calls)
    granted = json.loads(found.policy)["Statement"]
    ends = next(one for one in granted if one["Action"] == "ec2:TerminateInstances")
    assert ends["Condition"]["StringEquals"] == {"aws:ResourceTag/phalanx-owner": "0123456789abcdef"}
    assert any(one["Action"] == "iam:PassRole" for one in json.loads(least_policy("o", passes_role=True))["Statement"])
    cloud.answers["describe_availability_zones"] = error("AuthFailure", 401, "bad keys")
    with pytest.raises(BadRequest, match="does not accept the credentials: AuthFailure: bad keys"):
        provider().check(SETTINGS)


def test_a_head_on_loopback_alone_has_no_such_pool():
    with pytest.raises(BadRequest, match="listens only on loopback"):
        provider(listens=False).offer(PoolTerms(template="p5.48xlarge", settings=SETTINGS))


def test_a_head_without_such_a_pool_does_not_import_the_library():
    source = Path(sys.modules["phalanx.providers.aws.ec2"].__file__ or "").read_text(encoding="utf-8")
    at_top = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [node for node in at_top if "boto" in ast.unparse(node)]


# ---- the machine's own end ---------------------------------------------------------------------------------------------


def test_a_machine_ends_when_it_is_not_wanted_or_its_head_is_silent():
    lease = MachineLease(silence_s=60.0, heard_s=100.0)
    assert lease.check(159.0) == ""
    lease.answered(159.0, wanted=True, why="")
    assert lease.check(218.0) == ""
    assert lease.check(219.0) == "the head has been silent for 60 s"
    other = MachineLease(silence_s=60.0, heard_s=100.0)
    other.answered(110.0, wanted=False, why="no pool has an order for p-0")
    assert other.check(110.0) == "the head does not want it: no pool has an order for p-0"


def test_a_console_is_read_as_it_is_now_else_as_it_was_posted(monkeypatch):
    cloud = Cloud(monkeypatch, get_console_output=[error("UnsupportedOperation"), {"Output": "no driver"}])
    assert provider().console(order(known_machine="i-1")) == "no driver"
    assert cloud.of("get_console_output") == [{"InstanceId": "i-1", "Latest": True}, {"InstanceId": "i-1"}]
    Cloud(monkeypatch, get_console_output={"InstanceId": "i-1"})
    assert provider().console(order(known_machine="i-1")) == ""
