"""The provider `azure` without a cloud: what it asks Azure for, and what the answers mean."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import base64
import json

import pytest

from phalanx.core.errors import BadRequest
from phalanx.planner.facts.instances import read_instances
from phalanx.planner.facts.prices import read_prices
from phalanx.ports.engine import MachineJoin
from phalanx.ports.provider import CallUnanswered, NodeOrder, OfferRefused
from phalanx.providers.azure import arm, provider
from phalanx.providers.azure.machine_request import interface_request, machine_name, machine_request
from phalanx.providers.azure.pool_terms import check_zones, make_offers, parse_group, parse_sizes, parse_terms
from phalanx.providers.azure.rights import is_allowed, least_role, needed_actions
from phalanx.providers.clouds.rest_calls import CloudReply
from tests.cloud_rigs import AZURE_SETTINGS

JOIN = MachineJoin(address="h:1", token="secret-token", fingerprint="f")
GROUP_PATH = f"/subscriptions/{AZURE_SETTINGS['subscription']}/resourceGroups/campaign"
FACTS = (read_instances(), read_prices())


def order(market="on-demand", zone="1", size="Standard_ND96isr_H100_v5"):
    return NodeOrder(node_id="p-0", token="t-1", template=size, pool="p", offer=f"{zone} {size} {market}")


def request(market="on-demand", zone="1", **settings):
    terms = parse_terms({**AZURE_SETTINGS, "market": market, **settings})
    return machine_request(order(market, zone), terms, "0123456789abcdef", JOIN)


def test_the_same_order_and_offer_give_the_same_machine_and_another_offer_another_one():
    assert request() == request()
    assert machine_name(order()) == machine_name(order()) != machine_name(order(zone="2"))
    assert len(machine_name(order())) <= 64


def test_a_machine_takes_its_disk_and_interface_along_and_has_tags_and_a_start_script():
    asked = request()
    name, properties = machine_name(order()), asked["properties"]
    assert asked["zones"] == ["1"]
    assert asked["tags"]["phalanx-offer"] == "1 Standard_ND96isr_H100_v5 on-demand"
    assert properties["storageProfile"]["osDisk"]["deleteOption"] == "Delete"
    (card,) = properties["networkProfile"]["networkInterfaces"]
    assert card["id"] == f"{GROUP_PATH}/providers/Microsoft.Network/networkInterfaces/{name}-nic"
    assert card["properties"]["deleteOption"] == "Delete"
    script = base64.b64decode(properties["osProfile"]["customData"]).decode()
    assert script.startswith("#!/bin/sh\n")
    assert "--head h:1 --fingerprint f --name p-0" in script
    assert "priority" not in properties
    wired = interface_request(order(), parse_terms(AZURE_SETTINGS), "o")["properties"]
    subnet = wired["ipConfigurations"][0]["properties"]["subnet"]["id"]
    assert subnet == f"{GROUP_PATH}/providers/Microsoft.Network/virtualNetworks/net/subnets/main"
    assert "zones" not in request(zone="any")


def test_spot_reservations_placement_and_images_are_asked_for():
    assert request("spot")["properties"]["evictionPolicy"] == "Delete"
    assert request("spot")["properties"]["billingProfile"] == {"maxPrice": -1}
    compute = f"{GROUP_PATH}/providers/Microsoft.Compute"
    held = request("reserved:block")["properties"]["capacityReservation"]["capacityReservationGroup"]["id"]
    assert held == f"{compute}/capacityReservationGroups/block"
    near = request(**{"proximity-group": "near", "scale-set": "ib", "identity": "/subscriptions/x/id"})
    assert near["properties"]["proximityPlacementGroup"]["id"] == f"{compute}/proximityPlacementGroups/near"
    assert near["properties"]["virtualMachineScaleSet"]["id"] == f"{compute}/virtualMachineScaleSets/ib"
    assert near["identity"]["userAssignedIdentities"] == {"/subscriptions/x/id": {}}
    one = request(**{"availability-set": "set"})["properties"]
    assert one["availabilitySet"]["id"] == f"{compute}/availabilitySets/set"
    image = request(image="/subscriptions/x/images/node")["properties"]["storageProfile"]["imageReference"]
    assert image == {"id": "/subscriptions/x/images/node"}
    assert request(plan="yes")["plan"] == {
        "publisher": "Canonical",
        "product": "ubuntu-24_04-lts",
        "name": "server",
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"subscription": ""}, "the subscription is missing"),
        ({"subscription": "mine"}, "is not the id of a subscription"),
        ({"group": ""}, "the resource group is missing"),
        ({"location": ""}, "the location is missing"),
        ({"image": "ubuntu"}, "is not an image"),
        ({"ssh-key": "AAAA"}, "is no public key"),
        ({"subnet": "main"}, "the subnet is missing"),
        ({"colour": "red"}, "no setting colour"),
        ({"market": "stolen"}, "market 'stolen'"),
        ({"scale-set": "a", "availability-set": "b"}, "not in both"),
        ({"credentials": "any"}, "neither environment nor instance"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(settings, words):
    with pytest.raises(BadRequest) as caught:
        parse_terms({**AZURE_SETTINGS, **settings})
    assert words in str(caught.value)


def test_sizes_have_their_prefix_and_prices_are_those_of_the_facts():
    assert parse_sizes("ND96isr_H100_v5,Standard_NC24ads_A100_v4") == (
        "Standard_ND96isr_H100_v5",
        "Standard_NC24ads_A100_v4",
    )
    assert check_zones(()) == ("any",)
    for parse, bad in ((check_zones, ("a",)), (parse_sizes, ""), (parse_sizes, "nd 96")):
        with pytest.raises(BadRequest):
            parse(bad)
    terms = parse_terms(AZURE_SETTINGS)
    (offer,) = make_offers(terms, ["Standard_ND96isr_H100_v5"], ["any"], None, FACTS)
    assert offer.price_per_h == 98.32


@pytest.mark.parametrize(
    ("code", "message", "status", "kind"),
    [
        ("AllocationFailed", "no", 0, OfferRefused),
        ("SkuNotAvailable", "no", 409, OfferRefused),
        ("OperationNotAllowed", "exceeds approved Cores Quota", 409, OfferRefused),
        ("OperationNotAllowed", "the machine is being deleted", 409, arm.AzureError),
        ("TooManyRequests", "wait", 429, CallUnanswered),
        ("Whatever", "no", 503, CallUnanswered),
        ("RetryableError", "no", 0, CallUnanswered),
        ("AuthorizationFailed", "no", 403, arm.AzureError),
        ("ResourceNotFound", "no", 404, arm.AzureError),
    ],
)
def test_what_an_error_of_azure_means(code, message, status, kind):
    found = arm.error_of(code, message, status)
    assert type(found) is kind
    assert str(found) == f"{code}: {message}"


def test_an_operation_that_is_not_done_in_time_is_no_answer(monkeypatch):
    begun = CloudReply(status=202, headers={"azure-asyncoperation": "https://x/o"}, body={}, text="")
    running = CloudReply(status=200, headers={"retry-after": "60"}, body={"status": "InProgress"}, text="")
    monkeypatch.setattr(arm, "arm_reply", lambda *_: running)
    with pytest.raises(CallUnanswered, match="the operation is InProgress yet"):
        arm.finish(parse_group(AZURE_SETTINGS), begun)


def test_a_token_is_never_sent_to_another_service(monkeypatch):
    monkeypatch.delenv(arm.ENDPOINT_VARIABLE, raising=False)
    with pytest.raises(CallUnanswered, match="of another service"):
        arm.arm_reply(parse_group(AZURE_SETTINGS), "GET", "https://evil.example/next")


def test_rights_know_wildcards_and_what_is_taken_away():
    held = [
        {"actions": ["Microsoft.Compute/*/read", "microsoft.network/*"], "notActions": ["Microsoft.Network/*/delete"]}
    ]
    assert is_allowed(held, "Microsoft.Compute/disks/read")
    assert not is_allowed(held, "Microsoft.Compute/disks/delete")
    assert is_allowed(held, "Microsoft.Network/networkInterfaces/write")
    assert not is_allowed(held, "Microsoft.Network/networkInterfaces/delete")
    names = needed_actions(["scale-set", "group"])
    assert "Microsoft.Compute/virtualMachineScaleSets/write" in names
    role = json.loads(least_role(parse_group(AZURE_SETTINGS), names))
    assert role["Actions"] == list(names)
    assert role["AssignableScopes"] == [GROUP_PATH]


def test_times_of_azure_have_seven_digits():
    assert provider._seconds("2026-11-28T20:00:00.1234567Z") == pytest.approx(1795896000.123456)
    assert provider._seconds("2026-11-28T20:00:00Z") == 1795896000.0
