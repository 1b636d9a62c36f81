"""What credentials may do on EC2, tried by dry runs, and the least policy that lets the provider work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.ports.provider import CloudRight
from phalanx.providers.aws import ec2
from phalanx.providers.aws.pool_terms import AccountTerms

_NO_MACHINE: Final = "i-00000000000000000"
_NO_SUBNET: Final = "subnet-00000000000000000"


def check_rights(account: AccountTerms, image: str) -> Sequence[CloudRight]:
    """Try each call as a dry run. `image`: the start of an instance is only tried with one.

    Raises:
        BadRequest: there are no credentials, or EC2 does not accept them.
    """
    tried: list[tuple[str, dict[str, Any]]] = [
        ("describe_availability_zones", {}),
        ("describe_instance_types", {}),
        ("describe_instances", {}),
        ("describe_subnets", {"SubnetIds": [_NO_SUBNET]}),
        ("get_console_output", {"InstanceId": _NO_MACHINE}),
        ("terminate_instances", {"InstanceIds": [_NO_MACHINE]}),
    ]
    if image:
        tags = [{"ResourceType": "instance", "Tags": [{"Key": "phalanx-owner", "Value": "dry-run"}]}]
        start = {"ImageId": image, "InstanceType": "t3.micro", "MinCount": 1, "MaxCount": 1, "TagSpecifications": tags}
        tried.append(("run_instances", start))
    found = [_try(account, operation, arguments) for operation, arguments in tried]
    if not image:
        found.append(CloudRight(name="ec2:RunInstances", allowed=None, why="not tried without an image"))
    return found


def least_policy(owner: str, *, passes_role: bool) -> str:
    """Return the policy as JSON. It terminates only instances with the tag of this head."""
    describe = ["AvailabilityZones", "InstanceTypes", "Instances", "Subnets"]
    statements: list[dict[str, Any]] = [
        {"Effect": "Allow", "Action": [f"ec2:Describe{what}" for what in describe], "Resource": "*"},
        {"Effect": "Allow", "Action": "ec2:GetConsoleOutput", "Resource": "arn:aws:ec2:*:*:instance/*"},
        {"Effect": "Allow", "Action": "ec2:RunInstances", "Resource": "*"},
        {
            "Effect": "Allow",
            "Action": "ec2:CreateTags",
            "Resource": "arn:aws:ec2:*:*:*/*",
            "Condition": {"StringEquals": {"ec2:CreateAction": "RunInstances"}},
        },
        {
            "Effect": "Allow",
            "Action": "ec2:TerminateInstances",
            "Resource": "arn:aws:ec2:*:*:instance/*",
            "Condition": {"StringEquals": {"aws:ResourceTag/phalanx-owner": owner}},
        },
    ]
    if passes_role:
        statements.append({"Effect": "Allow", "Action": "iam:PassRole", "Resource": "arn:aws:iam::*:role/*"})
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2)


def _try(account: AccountTerms, operation: str, arguments: dict[str, Any]) -> CloudRight:
    """Try one call.

    Raises:
        BadRequest: EC2 does not accept the credentials, or does not answer.
    """
    name = "ec2:" + "".join(word.capitalize() for word in operation.split("_"))
    try:
        ec2.call(account, operation, **arguments, DryRun=True)
    except ec2.Ec2Error as error:
        # A check of rights comes before that of whether things exist.
        allowed = error.code == "DryRunOperation" or error.code.endswith(".NotFound")
        return CloudRight(name=name, allowed=allowed, why="" if allowed else str(error))
    except OSError as error:
        raise BadRequest(f"EC2 does not answer: {error}") from error
    return CloudRight(name=name, allowed=True)
