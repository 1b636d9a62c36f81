"""How a kubeconfig, a pod's service account and an exec plugin become the access to a cluster. Pure but for small files."""

import base64
import json
import os
import stat

import pytest

from phalanx.core.errors import BadFile, BadRequest, NotSignedIn
from phalanx.engines.kubernetes.credentials import Credential, CredentialSource, ExecPlugin, run_plugin
from phalanx.engines.kubernetes.kubeconfig import find_access, service_account_access
from phalanx.engines.kubernetes.rest import RateLimit

CONFIG = """
apiVersion: v1
kind: Config
current-context: work
contexts:
- name: work
  context: {cluster: east, user: ada, namespace: research}
- name: play
  context: {cluster: west, user: bob}
- name: broken
  context: {cluster: nowhere, user: bob}
clusters:
- name: east
  cluster: {server: "https://east.example:6443/", certificate-authority: ca.pem, tls-server-name: api.east}
- name: west
  cluster: {server: "https://west.example", certificate-authority-data: "Q0Eh", insecure-skip-tls-verify: true}
users:
- name: ada
  user: {client-certificate: ada.pem, client-key-data: "S0VZ"}
- name: bob
  user: {tokenFile: bob.token}
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "ca.pem").write_text("the CA")
    (tmp_path / "ada.pem").write_text("the certificate")
    (tmp_path / "bob.token").write_text("first\n")
    path = tmp_path / "config"
    path.write_text(CONFIG)
    return path


def access(path, context=""):
    return find_access(context, {"KUBECONFIG": str(path)})


def test_the_current_context_names_cluster_user_and_namespace(config):
    found = access(config)
    assert (found.context, found.server, found.namespace) == ("work", "https://east.example:6443", "research")
    assert (found.ca_pem, found.certificate_pem, found.key_pem) == ("the CA", "the certificate", "KEY")
    assert found.server_name == "api.east"


def test_another_context_is_chosen_by_name(config, tmp_path):
    found = access(config, "play")
    assert (found.server, found.namespace, found.ca_pem, found.insecure) == (
        "https://west.example",
        "default",
        "CA!",
        True,
    )
    assert found.token_file == str(tmp_path / "bob.token")


def test_secrets_are_in_no_representation(config):
    text = (
        repr(access(config))
        + repr(Credential(token="t0p", key_pem="k3y"))
        + repr(ExecPlugin(command="c", variables={"A": "t0p"}))
    )
    assert not any(secret in text for secret in ("KEY", "the certificate", "t0p", "k3y"))


def test_of_several_files_the_first_that_defines_a_name_wins(config, tmp_path):
    other = tmp_path / "other"
    other.write_text(
        '{"current-context": "play", "contexts": [{"name": "work", "context": {"cluster": "west", "user": "bob"}}]}'
    )
    found = find_access("", {"KUBECONFIG": f"{other}:{config}"})
    assert found.context == "play"
    assert find_access("work", {"KUBECONFIG": f"{other}:{config}"}).server == "https://west.example"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("current-context: work", "current-context: ''"), "no current context"),
        (("current-context: work", "current-context: gone"), "no context gone"),
        (("current-context: work", "current-context: broken"), "names the cluster nowhere"),
        (("https://east.example:6443/", "east.example"), "is no URL"),
        (("ca.pem", "absent.pem"), "cannot read"),
        (('client-key-data: "S0VZ"', 'client-key-data: "%%%"'), "not base64"),
        (("client-certificate: ada.pem", "auth-provider: {name: gcp}"), "auth-provider"),
        (("client-certificate: ada.pem", "as-groups: [x]"), "impersonates groups"),
        (("client-certificate: ada.pem", "exec: {command: x}"), "apiVersion"),
        (("certificate-authority: ca.pem", "proxy-url: http://x"), "proxy-url"),
        (("contexts:\n", "contexts: {a: 1}\nmore:\n"), "not a list"),
        (("kind: Config", "kind: [Config"), "not YAML"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(config, change, message):
    config.write_text(CONFIG.replace(*change))
    with pytest.raises((BadFile, BadRequest), match=message) as caught:
        access(config)
    assert "\n" not in str(caught.value)


def test_without_a_file_the_error_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(BadRequest, match=r"no kubeconfig at .*absent"):
        access(tmp_path / "absent")


def test_a_pod_uses_its_service_account(tmp_path):
    for name, text in (("namespace", "research\n"), ("ca.crt", "the CA"), ("token", "t")):
        (tmp_path / name).write_text(text)
    found = service_account_access(
        {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}, str(tmp_path)
    )
    assert (found.server, found.namespace, found.ca_pem) == ("https://[fd00::1]:6443", "research", "the CA")
    assert found.token_file == str(tmp_path / "token")


def test_a_token_file_is_read_again_after_a_minute_or_a_refusal(tmp_path):
    path, clock = tmp_path / "token", [0.0]
    path.write_text("first\n")
    source = CredentialSource(Credential(), str(path), clock=lambda: clock[0])
    assert source.current().token == "first"
    path.write_text("second")
    clock[0] = 59.0
    assert source.current().token == "first"
    clock[0] = 61.0
    assert source.current().token == "second"
    path.write_text("third")
    source.forget()
    assert source.current().token == "third"
    path.unlink()
    source.forget()
    with pytest.raises(NotSignedIn, match="cannot read the token"):
        source.current()


def plugin(tmp_path, script, **options):
    path = tmp_path / "plugin"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return ExecPlugin(command=str(path), **options)


def test_an_exec_plugin_gets_its_variables_and_its_credential_is_used_until_it_ends(tmp_path):
    status = {"token": "$WHO-$#", "expirationTimestamp": "1970-01-01T00:16:40Z"}
    answer = json.dumps({"kind": "ExecCredential", "status": status}).replace('"', '\\"')
    script = f'echo "$KUBERNETES_EXEC_INFO" > {tmp_path}/info; echo "{answer}"'
    made = plugin(tmp_path, script, arguments=("a", "b"), variables={"WHO": "ada"})
    assert run_plugin(made, now_s=400.0) == (Credential(token="ada-2"), 540.0)
    assert json.loads((tmp_path / "info").read_text())["kind"] == "ExecCredential"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no such account >&2; exit 3", "failed with code 3: no such account"),
        ("echo nonsense", "printed no ExecCredential"),
        ("echo '{\"status\": {}}'", "neither a token nor a certificate"),
    ],
)
def test_a_plugin_that_fails_says_why_and_shows_no_output_of_its_own(tmp_path, script, message):
    with pytest.raises(NotSignedIn, match=message):
        run_plugin(plugin(tmp_path, script), 0.0)


def test_a_plugin_that_is_not_installed_brings_its_hint():
    with pytest.raises(NotSignedIn) as caught:
        run_plugin(ExecPlugin(command="/absent/plugin", install_hint="install it"), 0.0)
    assert caught.value.hint == "install it"


def test_a_plugin_beside_its_file_is_found_there(tmp_path):
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "./bin/login",
            "env": [{"name": "A", "value": "1"}],
        }
    }
    path = tmp_path / "config"
    path.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [
                    {
                        "name": "c",
                        "cluster": {
                            "server": "https://c",
                            "certificate-authority-data": base64.b64encode(b"x").decode(),
                        },
                    }
                ],
                "users": [{"name": "u", "user": user}],
            }
        )
    )
    found = access(path).plugin
    assert os.path.normpath(found.command) == str(tmp_path / "bin" / "login")
    assert found.variables == {"A": "1"}


def test_requests_beyond_the_burst_wait_for_the_rate():
    clock = [0.0]
    limit = RateLimit(10.0, 3, clock=lambda: clock[0])
    assert [round(limit.reserve_s(), 3) for _ in range(5)] == [0.0, 0.0, 0.0, 0.1, 0.2]
    clock[0] = 10.0
    assert [round(limit.reserve_s(), 3) for _ in range(4)] == [0.0, 0.0, 0.0, 0.1]
