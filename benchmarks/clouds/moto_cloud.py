"""A cloud for tests: moto's server for EC2 over HTTP, with what moto lacks and a real cloud has. Runs in moto's own environment, in
the folder of the checkout: `build/moto/bin/python -m benchmarks.clouds.moto_cloud`.

- Idempotency tokens as EC2 documents them: a repeated `RunInstances` gives the first instance, other words with the same token an error.
- The faults of `cloud_faults.py`.
- With `--boot`, each instance runs the script of its user data as a process of this machine after a drawn boot time. Its `shutdown` terminates the
  instance, and its console output is what the script printed.

`GET /cloud/list` has every instance that ever was, with the times in between which it is charged: what a bill would say.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs
from wsgiref.types import StartResponse

from moto.ec2.models.instances import Instance, InstanceBackend
from moto.ec2.responses.general import Base64EncodedString
from moto.ec2.responses.general import General as GeneralResponse
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from benchmarks.clouds.cloud_faults import CloudFaults

SWEEP_EVERY_S = 10.0
FORGOTTEN_S = 180.0  # EC2: about an hour
TRANSIENT = (
    b"<Response><Errors><Error><Code>%s</Code><Message>%s</Message></Error></Errors><RequestID>r</RequestID></Response>"
)


class Cloud(CloudFaults):
    """State beside moto's own."""

    def __init__(self, seed: int, faults: float, boot: tuple[float, float] | None) -> None:
        super().__init__(seed, faults)
        self.boot = boot
        self.reservations: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.swept_s = 0.0
        self.port = 0
        self.refused = ""  # error code of every start, for tests

    def is_listed(self, machine: str) -> bool:
        """Whether lists show the instance: not at once, and not for ever after its end."""
        return super().is_listed(machine) and not self.is_forgotten(machine)

    def is_forgotten(self, machine: str) -> bool:
        """Whether EC2 does not know the instance any more."""
        until_s = self.machines.get(machine, {}).get("until_s")
        return until_s is not None and time.time() > until_s + FORGOTTEN_S

    def sweep(self, backend: Any) -> None:
        """Take forgotten instances out of moto, whose lists go through all of them."""
        with self.lock:
            if time.monotonic() < self.swept_s + SWEEP_EVERY_S:
                return
            self.swept_s = time.monotonic()
            for name, found in list(backend.reservations.items()):
                if all(self.is_forgotten(one.id) for one in found.instances):
                    del backend.reservations[name]


def patch(cloud: Cloud) -> None:
    """Add idempotency tokens, lag and the bill to moto."""
    run, terminate = InstanceBackend.run_instances, Instance.terminate
    describe = InstanceBackend.describe_instances
    get_console_output = GeneralResponse.get_console_output

    def run_instances(self: Any, image_id: str, count: int, user_data: Any, groups: Any, **words: Any) -> Any:
        token = words.get("client_token") or ""
        asked = (image_id, words.get("instance_type"), str(words.get("placement")), user_data and user_data.decode())
        with cloud.lock:
            if token in cloud.reservations:
                found, before = cloud.reservations[token]
                cloud.count("idempotent replays")
                if before != asked:
                    raise _Ec2Error("IdempotentParameterMismatch", "the token was used with other parameters")
                return found
            made = run(self, image_id, count, user_data, groups, **words)
            cloud.reservations[token] = (made, asked)
            for instance in made.instances:
                tags = {tag["key"]: tag["value"] for tag in instance.get_tags()}
                since_s = instance.launch_time.timestamp()
                cloud.created(instance.id, tags.get("phalanx-token", ""), tags.get("phalanx-node", ""), since_s)
                if cloud.boot is not None:
                    after_s = cloud.dice.uniform(*cloud.boot)
                    threading.Timer(after_s, boot, (cloud, instance, user_data)).start()
            return made

    def terminated(self: Any, *words: Any, **more: Any) -> Any:
        with cloud.lock:
            known = cloud.machines.get(self.id)
            if known is not None and known["until_s"] is not None:
                return self._state  # a second call changes nothing, also not the time of the end
        found = terminate(self, *words, **more)
        with cloud.lock:
            if known is not None:
                cloud.ended(self.id, time.time())
            process = cloud.processes.pop(self.id, None)
        if process is not None:  # the power is off: nothing of it runs on
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            kill_machine(self.id)
        return found

    def described(self: Any, *words: Any, **more: Any) -> Any:
        cloud.sweep(self)
        found = describe(self, *words, **more)
        for reservation in found:
            reservation.instances = [one for one in reservation.instances if cloud.is_listed(one.id)]
        return [one for one in found if one.instances]

    def console_output(self: Any) -> Any:
        found = get_console_output(self)
        path = f"{os.environ.get('CLOUD_MACHINES', '')}/{self._get_param('InstanceId')}/console"
        if os.path.exists(path):
            with open(path, errors="replace") as console:
                found.result["Output"] = Base64EncodedString.from_raw_string(console.read())
        return found

    GeneralResponse.get_console_output = console_output
    InstanceBackend.run_instances = run_instances
    InstanceBackend.describe_instances = described
    Instance.terminate = terminated


class _Ec2Error(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(code)
        self.code, self.message = code, message


def boot(cloud: Cloud, instance: Any, user_data: Any) -> None:
    """Run the script of the instance's user data, in a session of its own."""
    with cloud.lock:
        if cloud.machines[instance.id]["until_s"] is not None:
            return
        folder = f"{os.environ['CLOUD_MACHINES']}/{instance.id}"
        os.makedirs(f"{folder}/bin", exist_ok=True)
        with open(f"{folder}/start", "w") as file:
            file.write(user_data.decode())
        off = f"#!/bin/sh\nexec {sys.executable} -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:{cloud.port}/cloud/off?{instance.id}\")'\n"
        with open(f"{folder}/bin/shutdown", "w") as file:
            file.write(off)
        os.chmod(f"{folder}/bin/shutdown", 0o700)
        environment = {
            "PATH": f"{folder}/bin:{os.environ['CLOUD_PATH']}",
            "HOME": folder,
            "PHALANX_HOME": f"{folder}/phalanx",
        }
        with open(f"{folder}/console", "wb") as console:
            cloud.processes[instance.id] = subprocess.Popen(
                ["sh", f"{folder}/start"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        cloud.machines[instance.id]["booted_s"] = time.time()
        cloud.count("booted")


def kill_machine(name: str) -> None:
    """Kill every process of the machine, also those in sessions of their own: their environment has a path in its folder."""
    mark = f"{os.environ.get('CLOUD_MACHINES', '')}/{name}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read():
                    os.kill(int(pid), signal.SIGKILL)
        except OSError:
            continue


class Front:
    """The WSGI application: faults before and after moto's answer."""

    def __init__(self, cloud: Cloud, moto: Callable[..., Iterable[bytes]]) -> None:
        self.cloud, self.moto = cloud, moto

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        path = environ.get("PATH_INFO", "")
        if path.startswith("/cloud/"):
            return self._control(path, environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        words = {name: values[0] for name, values in parse_qs(body.decode(errors="replace")).items()}
        action = words.get("Action", "")
        self.cloud.count(f"dry run of {action}" if words.get("DryRun") else action)
        if self.cloud.refused and action == "RunInstances" and not words.get("DryRun"):
            start_response("400 Bad Request", [("Content-Type", "text/xml")])
            return [TRANSIENT % (self.cloud.refused.encode(), b"The account may not start more of these")]
        if words.get("DryRun") or not self.cloud.faults:
            return self._moto(environ, body, start_response)
        return self._faulty(action, words, environ, body, start_response)

    def _faulty(
        self, action: str, words: dict[str, str], environ: dict[str, Any], body: bytes, start_response: StartResponse
    ) -> Iterable[bytes]:
        cloud = self.cloud

        def carry_out(awaited: bool) -> Iterable[bytes]:
            respond: Any = start_response if awaited else lambda *_: lambda _: None
            where = f"{words.get('Placement.AvailabilityZone')} {words.get('InstanceType')}"
            fresh = action == "RunInstances" and words.get("ClientToken", "") not in cloud.reservations
            if fresh and cloud.is_empty(where):
                return self._refuse("no capacity", b"InsufficientInstanceCapacity", 500, respond)
            return self._moto(dict(environ), body, respond)

        answer = cloud.deliver(
            carry_out,
            lambda: self._refuse(None, b"RequestLimitExceeded", 503, start_response),
            changes=action in {"RunInstances", "TerminateInstances"},
        )
        return _cut(environ) if answer is None else answer

    def _moto(self, environ: dict[str, Any], body: bytes, start_response: Any) -> Iterable[bytes]:
        from io import BytesIO

        environ["wsgi.input"] = BytesIO(body)
        try:
            return list(self.moto(environ, start_response))
        except _Ec2Error as error:
            start_response("400 Bad Request", [("Content-Type", "text/xml")])
            return [TRANSIENT % (error.code.encode(), error.message.encode())]

    def _refuse(self, what: str | None, code: bytes, status: int, start_response: StartResponse) -> Iterable[bytes]:
        if what is not None:
            self.cloud.count(what)
        start_response(f"{status} Error", [("Content-Type", "text/xml")])
        return [TRANSIENT % (code, code)]

    def _control(self, path: str, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        cloud = self.cloud
        if path == "/cloud/off":
            name = environ.get("QUERY_STRING", "")
            from moto.ec2 import ec2_backends

            for account in ec2_backends.values():
                for backend in account.values():
                    for one in backend.all_instances():
                        if one.id == name and one.state != "terminated":
                            one.terminate()
        if path == "/cloud/calm":
            cloud.faults = 0.0
        if path == "/cloud/refuse":
            cloud.refused = environ.get("QUERY_STRING", "")
        with cloud.lock:
            machines: Any = len(cloud.machines) if path == "/cloud/count" else list(cloud.machines.values())
            body = json.dumps({"machines": machines, "counts": cloud.counts})
        start_response("200 OK", [("Content-Type", "application/json")])
        return [body.encode()]


def _cut(environ: dict[str, Any]) -> Iterable[bytes]:
    """End the connection without an answer."""
    wire = environ.get("werkzeug.socket")
    if wire is not None:
        wire.shutdown(2)
    raise ConnectionAbortedError


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--port", type=int, required=True)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--faults", type=float, default=0.0)
    words.add_argument("--boot", default="", help="SECONDS-SECONDS: run the user data after a drawn time")
    given = words.parse_args()
    low, _, high = given.boot.partition("-")
    cloud = Cloud(given.seed, given.faults, (float(low), float(high or low)) if low else None)
    cloud.port = given.port
    patch(cloud)
    front = Front(cloud, DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", given.port, front, threaded=True)
    print("ready", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server.serve_forever()
    finally:
        for name, one in list(cloud.machines.items()):
            if one["until_s"] is None:
                kill_machine(name)
        if os.environ.get("CLOUD_MACHINES"):
            shutil.rmtree(os.environ["CLOUD_MACHINES"], ignore_errors=True)


if __name__ == "__main__":
    main()
