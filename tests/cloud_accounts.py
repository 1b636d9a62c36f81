"""Accounts at clouds for tests with a real head: what the head's environment has, and ways to make an account worse while the head runs.

AWS is moto's server with IAM enforced, Google and Azure are the servers of `benchmarks.clouds`. All are asked over HTTP only.
"""

import json
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from typing import Any

from benchmarks.clouds import google_dialect
from benchmarks.clouds.campaign_clouds import IMAGE, MOTO
from benchmarks.clouds.dialect import DialectAnswer
from benchmarks.clouds.dialect_server import make_dialect, serve
from benchmarks.cluster import ROOT, free_port
from phalanx.providers.azure import rights as azure_rights
from phalanx.providers.google import rights as google_rights
from tests.cloud_rigs import AZURE_SETTINGS, ScriptedFaults, azure_environment, google_environment, write_google_key

BEGIN_S = 60.0  # a guard
POLICY = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "ec2:*", "Resource": "*"}]}


WRONG_KEYS = {  # answers to a sign-in: status, code, words
    "google": (400, "invalid_grant", "Invalid JWT Signature."),
    "azure": (401, "invalid_client", "AADSTS7000215: Invalid client secret provided."),
}
NO_RIGHT = {  # answers to a start: code, words
    "google": ("forbidden", "Required 'compute.instances.create' permission for 'projects/campaign-project'"),
    "azure": (
        "AuthorizationFailed",
        "The client does not have authorization to perform action 'Microsoft.Compute/virtualMachines/write'",
    ),
}


class DialectAccount:
    """An account at a server of this process.

    Attributes:
        kind, zone, settings: of pools that the cloud accepts; `wrong_zone`: one that it lacks.
        right: the right that `take_right` takes, as `clouds check` names it.
        quota_code: what the cloud answers to a start without quota.
        wrong_keys: settings with which the keys are wrong from the start; `doomed_keys`: with those that `spoil_keys` deletes.
    """

    wrong_keys: tuple[str, ...] = ()
    doomed_keys: tuple[str, ...] = ()

    def __init__(self, name, folder):
        self.name = name
        self.dialect: Any = make_dialect(name, ScriptedFaults())
        self.keys_wrong = self.forbidden = False
        self._answer = self.dialect.answer
        self.dialect.answer = self._judged  # type: ignore[method-assign]
        self.server = serve(self.dialect)
        port = self.server.server_address[1]
        if name == "google":
            self.environment = google_environment(write_google_key(folder / "google.json", port), port)
            given = {
                "project": google_dialect.PROJECT,
                "image": f"projects/{google_dialect.PROJECT}/global/images/node",
            }
            self.kind, self.zone, self.wrong_zone = "g2-standard-4", "us-central1-a", "mars-central9-a"
            self.right, self.quota_code = "compute.instances.create", "QUOTA_EXCEEDED"
        else:
            self.environment, given = azure_environment(port), AZURE_SETTINGS
            self.kind, self.zone, self.wrong_zone = "NC4as_T4_v3", "1", "9"
            self.right, self.quota_code = "Microsoft.Compute/virtualMachines/write", "OperationNotAllowed"
        self.settings = [f"{key}={value}" for key, value in given.items()]

    def _judged(self, call):
        if self.keys_wrong:
            if call.path.endswith("/token"):
                status, code, why = WRONG_KEYS[self.name]
                return DialectAnswer(status, {"error": code, "error_description": why})
            call.headers["authorization"] = "Bearer of a key that was deleted"
        if self.forbidden and self.is_start(call):
            reason, message = NO_RIGHT[self.name]
            error = {
                "code": 403 if self.name == "google" else reason,
                "message": message,
                "errors": [{"reason": reason, "message": message}],
            }
            return DialectAnswer(403, {"error": error})
        return self._answer(call)

    def is_start(self, call):
        if self.name == "google":
            return call.method == "POST" and call.path.endswith("/instances")
        return call.method == "PUT" and "/virtualMachines/" in call.path

    def spoil_keys(self):
        """The cloud accepts the keys of the head no more."""
        self.keys_wrong = True

    def take_right(self):
        self.forbidden = True
        if self.name == "google":
            self.dialect.permissions = {*google_rights.NEEDED, google_rights.CONSOLE_PERMISSION} - {self.right}
        else:
            self.dialect.actions = [
                name for name in (*azure_rights.NEEDED, azure_rights.CONSOLE_ACTION) if name != self.right
            ]

    def end_quota(self):
        self.dialect.refused = self.quota_code

    def restore(self):
        self.keys_wrong = self.forbidden = False
        self.dialect.refused = ""
        if self.name == "google":
            self.dialect.permissions = None
        else:
            self.dialect.actions = ["*"]

    def machines(self):
        """Every machine that ever was, by the cloud's own list."""
        return list(self.dialect.faults.machines)

    def starts(self):
        """How often the cloud was asked to start a machine."""
        counts = self.dialect.faults.counts
        return counts.get("POST instances", 0) + counts.get("PUT virtualMachines", 0)

    def calls(self):
        return sum(self.dialect.faults.counts.values())

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class AwsAccount:
    """A user of moto's IAM: moto checks signatures and policies. See `DialectAccount`."""

    wrong_keys = ("profile=wrong",)
    doomed_keys = ("profile=doomed",)

    def __init__(self, folder):
        self.name, self.port = "aws", free_port()
        self.kind, self.zone, self.wrong_zone = "g4dn.xlarge", "us-east-1a", "us-east-1z"
        self.right, self.quota_code = "ec2:RunInstances", "VcpuLimitExceeded"
        self.url = f"http://127.0.0.1:{self.port}"
        self.settings = ["region=us-east-1", f"image={IMAGE}", f"endpoint={self.url}"]
        words = [str(MOTO), "-m", "benchmarks.clouds.moto_cloud", "--port", str(self.port)]
        with (folder / "moto").open("wb") as output:
            self.server = subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=output)
        until_s = time.monotonic() + BEGIN_S
        while True:
            try:
                self.ask("count")
                break
            except OSError:
                assert time.monotonic() < until_s, "moto does not answer"
                time.sleep(0.1)
        self.iam("CreateUser", UserName="head")
        self.grant(POLICY)
        self.keys = {name: self.make_key() for name in ("default", "doomed")}
        self.keys["wrong"] = (self.keys["default"][0], "not-the-secret")
        text = "".join(
            f"[{name}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
            for name, (key, secret) in self.keys.items()
        )
        (folder / "aws").write_text(text)
        self.environment = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": str(folder / "aws")}
        self.enforce(True)

    def make_key(self):
        made = self.iam("CreateAccessKey", UserName="head")
        return tuple(made.partition(f"<{tag}>")[2].partition("<")[0] for tag in ("AccessKeyId", "SecretAccessKey"))

    def ask(self, word):
        with urllib.request.urlopen(f"{self.url}/cloud/{word}", timeout=30) as reply:
            return json.load(reply)

    def enforce(self, on):
        """Turn moto's checks of signatures and policies on or off."""
        request = urllib.request.Request(
            f"{self.url}/moto-api/reset-auth", b"0" if on else b"inf", {"Content-Type": "text/plain"}, method="POST"
        )
        urllib.request.urlopen(request, timeout=30).close()

    def iam(self, action, **words):
        """Call IAM as the owner of the account."""
        content = urllib.parse.urlencode({"Action": action, "Version": "2010-05-08", **words}).encode()
        scope = "Credential=owner/20260101/us-east-1/iam/aws4_request"
        headers = {"Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=0"}
        with urllib.request.urlopen(urllib.request.Request(self.url, content, headers), timeout=30) as reply:
            return reply.read().decode()

    def grant(self, policy):
        self.iam("PutUserPolicy", UserName="head", PolicyName="p", PolicyDocument=json.dumps(policy))

    def spoil_keys(self):
        self.enforce(False)
        self.iam("DeleteAccessKey", UserName="head", AccessKeyId=self.keys["doomed"][0])
        self.enforce(True)

    def take_right(self):
        self.enforce(False)
        self.grant(
            {
                **POLICY,
                "Statement": [*POLICY["Statement"], {"Effect": "Deny", "Action": "ec2:RunInstances", "Resource": "*"}],
            }
        )
        self.enforce(True)

    def end_quota(self):
        self.ask(f"refuse?{self.quota_code}")

    def restore(self):
        self.enforce(False)
        self.grant(POLICY)
        self.ask("refuse?")
        self.enforce(True)

    def machines(self):
        return self.ask("list")["machines"]

    def starts(self):
        return self.ask("list")["counts"].get("RunInstances", 0)

    def calls(self):
        return sum(self.ask("list")["counts"].values())

    def close(self):
        self.server.kill()
        self.server.wait()


@contextmanager
def open_account(name, folder):
    account = AwsAccount(folder) if name == "aws" else DialectAccount(name, folder)
    try:
        yield account
    finally:
        account.close()
