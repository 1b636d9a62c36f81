"""Prompts that one service reads for another: the key of the job file, files with roles, who is joined with whom, and the bodies of requests."""

# mypy: disable-error-code="arg-type, union-attr"

import json

import pytest

from phalanx.cli.serve.role_files import service_requests
from phalanx.core.errors import BadFile
from phalanx.core.ids import ProjectId, QueueId, ServiceId, UserId
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.services.prefill_terms import PrefillTerms, TransferProtocol, parse_prefill_terms
from phalanx.core.work.services.service import ServiceState
from phalanx.gateway.prefill import body_with, check_fields, is_divisible
from phalanx.gateway.refusals import Refused
from phalanx.gateway.services import ServiceTable
from phalanx.wire.api.services import ServiceView

FILE = """
type: service
name: chat
env: {A: "1"}
gpus: 1
roles:
  prefill: {replicas: 1..4, run: prefill --port $PORT, env: {B: "2"}}
  decode: {gpus: 2, run: decode --port $PORT}
"""


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("chat", PrefillTerms(service=ServiceId("chat"))),
        (
            ["service=chat", "protocol=SGLang"],
            PrefillTerms(service=ServiceId("chat"), protocol=TransferProtocol.SGLANG),
        ),
    ],
)
def test_the_key_names_a_service_and_a_protocol(value, wanted):
    assert parse_prefill_terms(value, "chat-prefill") == wanted
    assert parse_prefill_terms(wanted.keys(), "chat-prefill") == wanted


@pytest.mark.parametrize(
    "value",
    [
        "Chat!",
        "own",
        "",
        {"protocol": "vllm"},
        {"service": "chat", "protocol": "ray"},
        {"service": "chat", "port": "1"},
    ],
)
def test_a_wrong_value_is_refused(value):
    with pytest.raises(InvalidKey, match="prefill_for"):
        parse_prefill_terms(value, "own")


def test_a_file_with_roles_is_two_services(tmp_path):
    path = tmp_path / "chat.yaml"
    path.write_text(FILE)
    reads, answers = service_requests(str(path), copy=False)
    assert (reads.spec.name, str(reads.spec.role.gpus), reads.mapping["env"]) == ("chat-prefill", "1", {"B": "2"})
    assert reads.spec.service.prefill == PrefillTerms(service=ServiceId("chat"))
    assert (answers.spec.name, str(answers.spec.role.gpus), answers.mapping["env"]) == ("chat", "2", {"A": "1"})
    assert (answers.spec.service.prefill, answers.spec.service.range_text) == (None, "1")
    path.write_text(FILE.replace("roles:", "roles:\n  protocol: sglang"))
    assert service_requests(str(path), copy=False)[0].spec.service.prefill.protocol is TransferProtocol.SGLANG


@pytest.mark.parametrize(
    ("before", "after", "line", "why"),
    [
        ("name: chat\n", "", 5, "needs a name"),
        ("  decode:", "  encode:", 8, "unknown key 'encode'"),
        ("  decode: {gpus: 2, run: decode --port $PORT}\n", "", 6, "decode is missing"),
        ("{gpus: 2,", "{name: x, gpus: 2,", 8, "has no name of its own"),
        ("{gpus: 2,", "{gpos: 2,", 8, "unknown key 'gpos'"),
        ("{gpus: 2,", "{gpus: none,", 8, "gpus"),
        ("  prefill: {", "  protocol: ray\n  prefill: {", 0, "neither vllm nor sglang"),
        ("type: service\n", "", 0, "prefill_for|replicas"),
    ],
)
def test_a_wrong_file_with_roles_names_its_line(tmp_path, before, after, line, why):
    path = tmp_path / "chat.yaml"
    assert before in FILE
    path.write_text(FILE.replace(before, after))
    with pytest.raises(BadFile, match=why) as found:
        service_requests(str(path), copy=False)
    assert str(path) in found.value.message
    if line:
        assert f"chat.yaml:{line}" in found.value.message, found.value.message


def view(name, *, user="ann", project="nlp", reads=""):
    return ServiceView(
        name=ServiceId(name),
        state=ServiceState.READY,
        user=UserId(user),
        project=ProjectId(project),
        queue=QueueId("q"),
        created_s=1.0,
        revision=1,
        served_revision=1,
        replicas="1",
        desired=1,
        ready=1,
        prefill_for=reads,
        protocol="vllm" if reads else "",
    )


def test_only_its_owners_service_reads_what_a_service_is_asked():
    table = ServiceTable(replica_limit=8, waiting_max=8)
    table.update(
        [
            view("chat"),
            view("a-spy", user="eve", reads="chat"),
            view("b-other", project="cv", reads="chat"),
            view("reader", reads="chat"),
            view("second", reads="chat"),
            view("chain", reads="reader"),
        ]
    )
    found = {name: (one.prefill and one.prefill.view.name, one.reads_for) for name, one in table.services.items()}
    assert found.pop("chat") == ("reader", "")
    assert found.pop("reader") == (None, "chat")
    assert set(found.values()) == {(None, "")}
    table.update([view("chat"), view("second", reads="chat")])
    assert table.services["chat"].prefill is table.services["second"]
    table.update([view("chat")])
    assert table.services["chat"].prefill is None


def test_bodies_change_in_the_fields_that_are_named_only():
    body = b'{"model":"chat","messages":[{"role": "user",  "content":"\\u00e9"}],"max_tokens":9,"x":1.50}'
    found = body_with(body, {"max_tokens": 1, "stream": False}, ("stream_options",))
    assert b'[{"role": "user",  "content":"\\u00e9"}]' in found
    assert b"1.50" in found
    assert json.loads(found) == {**json.loads(body), "max_tokens": 1, "stream": False}


@pytest.mark.parametrize(
    ("path", "more", "wanted"),
    [
        ("/v1/chat/completions", {}, True),
        ("/v1/completions", {"prompt": "a"}, True),
        ("/v1/completions", {"prompt": [1, 2]}, True),
        ("/v1/completions", {"prompt": ["a", "b"]}, False),
        ("/v1/completions", {"prompt": [[1], [2]]}, False),
        ("/v1/completions", {"prompt": "a", "echo": True}, False),
        ("/v1/chat/completions", {"n": 1, "echo": False}, True),
        ("/v1/chat/completions", {"n": 2}, False),
        ("/v1/chat/completions", {"prompt_logprobs": 0}, False),
        ("/v1/embeddings", {"input": "a"}, False),
    ],
)
def test_prompts_that_cannot_be_read_elsewhere(path, more, wanted):
    assert is_divisible(path, json.dumps({"model": "chat", **more}).encode()) is wanted


def test_a_client_names_no_host_for_engines():
    check_fields(b'{"messages":[{"content":"what is bootstrap_host?"}]}')
    for name in ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"):
        with pytest.raises(Refused, match=name):
            check_fields(json.dumps({"model": "chat", name: 1}).encode())
        escaped = "".join(f"\\u{ord(one):04x}" for one in name)
        with pytest.raises(Refused, match=name):
            check_fields(f'{{"model":"chat","{escaped}":1}}'.encode())
