"""Tables of smaller clouds, their keys and signatures, and what the provider `http` does without idempotency tokens."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import base64
import os
import stat
import subprocess
import time
from email.utils import formatdate

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.node_pool import ListedMachine
from phalanx.ports.provider import CallUnanswered, PoolTerms
from phalanx.providers.clouds import rest_calls
from phalanx.providers.clouds.pool_settings import MachineSettings
from phalanx.providers.clouds.rest_calls import check_url, retry_after_s
from phalanx.providers.clouds.start_script import start_script
from phalanx.providers.http.cloud_table import fill, look_up, look_up_all, read_table
from phalanx.providers.http.signed_calls import read_keys, sign_crusoe
from tests.cloud_rigs import head, open_rig

CLEAR_TEXT = """url = "http://x.example"
auth = "bearer"
keys = ["K"]
[start]
path = "/a"
machine = "id"
[stop]
path = "/a"
[list]
path = "/a"
items = "a"
id = "id"
name = "name"
"""
JOIN = head().machine_join("p-0", "o")


@pytest.mark.parametrize("name", ["lambda", "runpod", "crusoe"])
def test_the_shipped_tables_are_valid_and_only_call_https(name, tmp_path):
    table = read_table(name, str(tmp_path))
    assert table.url.startswith("https://")
    assert table.settle_s >= 30
    assert table.start.body is not None
    assert {"{name}", "{zone}"} <= set(_texts(table.start.body))


def _texts(body):
    for value in body.values() if isinstance(body, dict) else body:
        yield from [value] if isinstance(value, str) else _texts(value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("../lambda", "", "not the name of a cloud"),
        ("nowhere", "", "no table of cloud nowhere"),
        ("own", "url = 1", "not a table of a cloud"),
        ("own", "url = [", "not a table of a cloud"),
        ("own", 'url = "https://x"\nauth = "magic"\nkeys = []\nstart = {}\nstop = {}\nlist = {}', "auth 'magic'"),
        (
            "own",
            CLEAR_TEXT,
            "in clear text",
        ),
    ],
)
def test_a_table_that_is_missing_or_wrong_is_one_line(name, text, words, tmp_path):
    tmp_path.chmod(0o700)
    if text:
        (tmp_path / f"{name}.toml").write_text(text)
    with pytest.raises(BadRequest) as caught:
        read_table(name, str(tmp_path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_that_others_may_change_is_not_read(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "own.toml").write_text("")
    (tmp_path / "own.toml").chmod(0o666)
    with pytest.raises(BadRequest, match="can be changed by others"):
        read_table("own", str(tmp_path))


def test_fields_of_bodies_are_filled_and_paths_find_what_answers_have():
    body = {"a": ["{x}", "n-{x}"], "b": {"c": "{x:number}"}, "s": "sh -c {quoted-y}", "k": 1}
    assert fill(body, {"x": "7", "y": "a 'b' {x}"}) == {
        "a": ["7", "n-7"],
        "b": {"c": 7},
        "s": "sh -c 'a '\"'\"'b'\"'\"' {x}'",
        "k": 1,
    }
    with pytest.raises(KeyError):
        fill("{missing}", {})
    answer = {"data": {"ids": ["i-1", "i-2"], "types": {"a": {"n": 1}, "b": {"n": 2}}}}
    assert look_up(answer, "data.ids.1") == "i-2"
    assert look_up(answer, "data.ids.7") is None
    assert look_up(answer, "data.none.x") is None
    assert look_up_all(answer, "data.types.*.n") == [1, 2]
    assert look_up_all(answer, "data.types.*key") == ["a", "b"]


def test_keys_are_those_of_the_heads_account_and_no_file_that_others_may_read(tmp_path):
    table = read_table("crusoe", str(tmp_path))
    both = {"CRUSOE_ACCESS_KEY_ID": "a", "CRUSOE_SECRET_KEY": "b"}
    assert read_keys(table, str(tmp_path), both) == ("a", "b")
    with pytest.raises(BadRequest, match="no crusoe credentials"):
        read_keys(table, str(tmp_path), {"CRUSOE_ACCESS_KEY_ID": "a"})
    file = tmp_path / "crusoe.key"
    file.write_text("x\ny\n")
    file.chmod(0o644)
    with pytest.raises(BadRequest, match="others may read"):
        read_keys(table, str(tmp_path), {})
    file.chmod(0o600)
    assert read_keys(table, str(tmp_path), {}) == ("x", "y")
    file.write_text("x\n")
    with pytest.raises(BadRequest, match="has 1 lines, not 2"):
        read_keys(table, str(tmp_path), {})


def test_the_signature_of_crusoe_is_hmac_sha256_over_five_lines():
    # By openssl: printf '/v1alpha5/x\n\nGET\n2026-11-28T20:00:00+00:00\n' | openssl dgst -sha256 -hmac campaign-secret -binary | base64
    text = "/v1alpha5/x\n\nGET\n2026-11-28T20:00:00+00:00\n"
    found = subprocess.run(
        ["openssl", "dgst", "-sha256", "-hmac", "campaign-secret", "-r"],
        input=text.encode(),
        capture_output=True,
        check=True,
    )
    expected = base64.urlsafe_b64encode(bytes.fromhex(found.stdout.split()[0].decode())).decode().rstrip("=")
    assert sign_crusoe("Y2FtcGFpZ24tc2VjcmV0", text) == expected


def test_no_second_create_is_sent_before_the_list_is_sure(tmp_path, monkeypatch):
    with open_rig("lambda", tmp_path, monkeypatch) as cloud:
        name = cloud.provider._name(cloud.order())
        cloud.provider.sent_s[name] = time.monotonic() + 1000.0  # a call without an answer
        with pytest.raises(CallUnanswered, match=f"may have started {name}"):
            cloud.provider.start(cloud.order())
        assert cloud.faults.machines == {}
        later = type(cloud.provider)(head=head(), folder=cloud.provider.folder)
        later.open([cloud.order(), cloud.order(1, known_machine="lambda-9")])
        assert list(later.sent_s) == [name]  # an earlier head may have sent it


def test_a_machine_of_no_known_order_is_listed_under_its_name(tmp_path, monkeypatch):
    with open_rig("runpod", tmp_path, monkeypatch) as cloud:
        found = cloud.provider.start(cloud.order())
        later = type(cloud.provider)(head=head(), folder=cloud.provider.folder)
        name = cloud.provider._name(cloud.order())
        assert later.machines(cloud.settings) == [ListedMachine(machine=found.machine, node_id="", token=name)]
        other = type(cloud.provider)(head=head(), folder=cloud.provider.folder)
        other.head.derive_id = lambda purpose: "f" * 64
        assert other.machines(cloud.settings) == []


def test_an_operation_that_fails_for_want_of_capacity_is_a_refusal_and_is_not_followed_again(tmp_path, monkeypatch):
    with open_rig("crusoe", tmp_path, monkeypatch) as cloud:
        cloud.dialect.refused = "out_of_stock"
        with pytest.raises(OSError, match="out_of_stock"):
            cloud.provider.start(cloud.order())
        assert cloud.provider.operations == {}
        cloud.dialect.refused = ""
        assert cloud.provider.start(cloud.order(1)).machine in cloud.running()


def test_a_pool_needs_what_its_table_says_and_a_shape(tmp_path, monkeypatch):
    with open_rig("lambda", tmp_path, monkeypatch) as cloud:
        for missing in ("ssh-key", "virtual"):
            settings = {name: value for name, value in cloud.settings.items() if name != missing}
            with pytest.raises(BadRequest):
                cloud.provider.offer(PoolTerms(template=cloud.template, zones=cloud.zones, settings=settings))
        real = {**cloud.settings, "shape": "h100:8", "cpus": "208", "memory": "1800GiB"}
        del real["virtual"]
        made = cloud.provider.offer(PoolTerms(template=cloud.template, zones=cloud.zones, settings=real))
        assert (len(made.devices), made.devices[0].model, made.cpus) == (8, "h100-sxm5-80gb", 208)


# ---- what the providers of clouds share --------------------------------------------------------------------------------------


def test_credentials_go_only_over_tls_or_to_this_machine():
    assert check_url("https://x.example/v1/") == "https://x.example/v1"
    assert check_url("http://127.0.0.1:80/x") == "http://127.0.0.1:80/x"
    for url in ("http://x.example", "ftp://x", "x", "https://", "http://127.0.0.1.evil.example", "https://[::1"):
        with pytest.raises(BadRequest):
            check_url(url)


def test_a_pause_that_a_cloud_asks_for_is_kept_within_bounds(monkeypatch):
    assert retry_after_s({"retry-after": "7"}) == 7.0
    assert retry_after_s({"retry-after": "100000"}) == 300.0
    assert retry_after_s({"retry-after": "soon"}) == 0.0
    assert retry_after_s({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0
    assert retry_after_s({}) == 0.0
    service = rest_calls.RestCalls(url="https://x.example")
    reply = rest_calls.CloudReply(status=429, headers={"retry-after": "9"}, body={}, text="")
    sent: list[str] = []

    def send(opener, request):
        sent.append(request.full_url)
        return reply

    monkeypatch.setattr(rest_calls, "send_request", send)
    assert service.send("GET", "/a").status == 429
    with pytest.raises(CallUnanswered, match="asked for a pause"):
        service.send("GET", "/a")
    assert len(sent) == 1


def test_a_start_script_ends_the_machine_in_the_way_of_its_cloud(tmp_path):
    plain = start_script("p-0", JOIN, MachineSettings(), notices="")
    assert plain.splitlines()[-1] == "exec shutdown -h now"
    assert "PHALANX_POWER_OFF" not in plain
    own = start_script("p-0", JOIN, MachineSettings(setup="false"), notices="", power_off="touch ended")
    path = tmp_path / "start"
    path.write_text(own)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    subprocess.run(["sh", str(path)], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, check=True, timeout=60)
    assert (tmp_path / "ended").exists()


# ---- the clock of the cloud ---------------------------------------------------------------------------------------------


def test_times_of_a_bill_are_by_the_clock_of_the_cloud_where_the_heads_was_set(monkeypatch):
    at_s = 1_795_000_000.0
    headers = {"date": formatdate(at_s, usegmt=True)}
    for own_s, expected_s in ((at_s + 1.2, at_s + 1.2), (at_s - 1.4, at_s - 1.4), (at_s + 7200.0, at_s + 0.5)):
        monkeypatch.setattr(time, "time", lambda own_s=own_s: own_s)
        assert rest_calls.answer_time_s(headers) == expected_s
        assert rest_calls.answer_time_s({}) == rest_calls.answer_time_s({"date": "soon"}) == own_s


def test_a_service_has_a_time_that_no_set_clock_moves(monkeypatch):
    service = rest_calls.RestCalls(url="http://127.0.0.1:1")
    monkeypatch.setattr(time, "time", lambda: 5.0)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    assert service.now_s() == 5.0
    reply = rest_calls.CloudReply(status=200, headers={"date": formatdate(9000.0, usegmt=True)}, body={}, text="{}")
    monkeypatch.setattr(rest_calls, "send_request", lambda *_: reply)
    service.send("GET", "/x")
    monkeypatch.setattr(time, "time", lambda: 70_000.0)
    monkeypatch.setattr(time, "monotonic", lambda: 103.0)
    assert service.now_s() == 9003.5
