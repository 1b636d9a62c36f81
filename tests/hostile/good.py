"""A good request for every operation: the seed of hostile ones. A route that is missing here fails `test_every_route_has_a_good_request`."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

from phalanx.core.state.reports import MemberReady
from phalanx.planner.calibration.profile import NodeMeasurement, Profile
from phalanx.planner.calibration.record_codec import encode_record
from phalanx.wire.manifest import CheckpointManifest, ManifestFile, encode
from phalanx.wire.supervisor import encode_envelope
from tests.contract.api_head import make_node

BLOB = b"a working directory"
DIGEST = hashlib.sha256(BLOB).hexdigest()
MANIFEST = encode(
    CheckpointManifest(
        format=1,
        step=1,
        epoch=1,
        world_size=1,
        files=(ManifestFile(path="shard-0", size_bytes=len(BLOB), crc32=zlib.crc32(BLOB)),),
    )
)
RULE = {"name": "spot", "codes": [117], "blame": "preempted", "remedy": "elsewhere", "says": "the spot market took it"}
SOON_S = time.time() + 3600
FULL_JOB = {
    "run": ["python", "train.py"],
    "name": "train",
    "gpus": "1",
    "cpus": 1,
    "memory": "1GiB",
    "workdir": "/tmp",
    "env": {"A": "b"},
    "tasks_per_node": 1,
    "priority": 3,
    "queue": "side",
    "time": "2h",
    "idle": "1h",
    "terminal": False,
    "retry": 2,
    "grace": "10s",
    "labels": {"team": "x"},
    "hold": True,
    "depends_on": "afterany:1",
    "array": "0-3",
    "begin": SOON_S,
    "nodelist": "n0",
    "exclude": "n[7-9]",
    "collective_timeout": "5m",
    "setup": "true",
    "software": {"modules": ["cuda/12"], "conda": "ml"},
    "checkpoint": "/tmp/c",
    "warm": False,
}


SERVICE = {
    "type": "service",
    "name": "web",
    "run": ["python", "-m", "http.server"],
    "workdir": "/tmp",
    "queue": "side",
    "replicas": "1..2",
    "port": 8000,
    "ready": "/health",
    "ready_within": "1m",
    "gpus": 1,
    "sleep": "/sleep?level=1",
    "wake": "/wake_up",
    "scale": {"ttft": "500ms", "queue": "2s", "kv": "80%", "in_flight": 16, "idle": "10m"},
}


@dataclass(frozen=True)
class Good:
    """Query and body of an operation that does what it should; `headers` that it may carry beside."""

    query: dict[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


def good_requests(job_id: str, epoch: int) -> dict[str, Good]:
    """By operation id, about a job that runs."""
    part: dict[str, Any] = {"job_id": job_id, "epoch": epoch}
    step = {**part, "step": 1, "digest": hashlib.sha256(MANIFEST).hexdigest()}
    place = {**part, "generation": 0, "node_id": "n0"}
    event = json.loads(msgspec.json.encode(encode_envelope(1, MemberReady(**place, port=29500))))
    node = msgspec.to_builtins(make_node("n0", 2))
    sample = {
        "index": 0,
        "uuid": "VIRTUAL-n0-0",
        "counter": "none",
        "utilization": 0.5,
        "memory_used_bytes": 1,
        "memory_total_bytes": 2,
        "power_w": 1.0,
        "temperature_c": 30.0,
        "throttle": ["hot"],
        "virtual": True,
        "job_id": job_id,
    }
    queue = {
        "id": "side",
        "parent": None,
        "priority": 1,
        "open": True,
        "quota_gpus": 4,
        "borrow_gpus": 1,
        "lend_gpus": 1,
        "weight": 1.0,
        "gpus_per_user": 4,
        "jobs_per_user": 9,
        "budget_gpu_h": 10.0,
        "budget_period_s": 3600.0,
    }
    return {
        "submit_job": Good(body=FULL_JOB, headers={"Idempotency-Key": "k1"}),
        "dry_run": Good(body=FULL_JOB),
        "device_history": Good(query={"node": "n0", "device": 0, "since_s": 1.0, "until_s": 1e10, "step_s": 60.0}),
        "node_history": Good(query={"node": "n0", "since_s": 1.0, "until_s": 1e10, "step_s": 60.0}),
        "list_jobs": Good(
            query={
                "state": "pending",
                "user": "ada",
                "project": "default",
                "queue": "default",
                "name": "good",
                "label": "exp=7",
                "before_seq": 100,
                "limit": 10,
                "fold": "true",
            }
        ),
        **dict.fromkeys(
            (
                "list_nodes",
                "list_reservations",
                "list_pools",
                "list_licences",
                "list_users",
                "list_projects",
                "list_tokens",
                "list_queues",
                "list_secrets",
            ),
            Good(query={"after": ""}),
        ),
        "list_waste": Good(query={"kind": "idle", "early": True, "limit": 10}),
        "energy_report": Good(query={"since_s": 1.0, "until_s": 1e10, "by": "job", "limit": 10}),
        "usage_report": Good(query={"since_s": 1.0, "until_s": 1e10, "by": "job", "limit": 10}),
        "cost_report": Good(query={"since_s": 1.0, "until_s": 1e10, "by": "pool", "share_idle": "by-use", "limit": 10}),
        "show_invoice": Good(query={"since_s": 1.0, "until_s": 1e10}),
        "failures_report": Good(query={"since_s": 1.0, "until_s": 1e10, "by": "node", "limit": 10}),
        "put_prices": Good(
            body={
                "currency": "EUR",
                "prices": [
                    {"gpu": "h100", "pool": "p", "from": "2026-11-01", "per_gpu_hour": "2.49", "source": "offer"}
                ],
                "electricity": [
                    {"from": "2026-11-01", "per_kwh": "0.18", "pue": "1.25", "gco2_per_kwh": "344", "source": "grid"}
                ],
                "dry_run": True,
            }
        ),
        "renew_lease": Good(body={"supervisor_id": "s1", "node_id": "n0", "epochs": [[job_id, epoch]], "held_s": 1.0}),
        "receive_streams": Good(
            body={"supervisor_id": "s1", "chunks": [{**part, "stream": "rank-0", "offset": 0, "data": "aGVsbG8K"}]}
        ),
        "receive_events": Good(body={"supervisor_id": "s1", "events": [event]}),
        "register_supervisor": Good(
            body={"version": 1, "supervisor_id": "s1", "node": node, "members": [[job_id, epoch, 0]], "challenge": "1"}
        ),
        "fetch_commands": Good(query={"after": 0, "wait_s": 0.0}),
        "receive_samples": Good(
            body={
                "supervisor_id": "s1",
                "node_id": "n0",
                "at_s": 1.0,
                "devices": [sample],
                "load_1m": 1.0,
                "cpu_utilization": 0.5,
                "memory_available_bytes": 1,
                "memory_total_bytes": 2,
                "network_received_bytes_per_s": 1.0,
                "network_sent_bytes_per_s": 1.0,
                "disk_free_bytes": 1,
                "every_s": 1.0,
            }
        ),
        "exchange_data_peers": Good(body={"supervisor_id": "s1", **part, "port": 20001, "fingerprint": "sha256:00"}),
        "fetch_exec_input": Good(query={"after": 0, "limit": 10, "signals": 0, "closed": "false", "wait_s": 0.0}),
        "receive_exec_output": Good(body={"offset": 0, "data": "aGVsbG8K", "exit_code": None, "error": ""}),
        "begin_checkpoint": Good(query=step, body=MANIFEST),
        "receive_checkpoint_piece": Good(query={**step, "path": "shard-0", "offset": 0}, body=BLOB),
        "download_checkpoint_file": Good(query={**part, "of_epoch": epoch, "step": 1, "path": "shard-0", "offset": 0}),
        "show_checkpoint": Good(query={**step, "wait_s": 0.0}),
        "list_stored_outputs": Good(query=part),
        "download_output_file": Good(query={**part, "path": "a.txt"}),
        "receive_output_piece": Good(
            query={
                **part,
                "path": "a.txt",
                "offset": 0,
                "crc32": zlib.crc32(BLOB),
                "size": len(BLOB),
                "mode": 420,
                "more": "false",
            },
            body=BLOB,
        ),
        "remove_output_file": Good(query={**part, "path": "a.txt"}),
        "update_job": Good(body={"name": "other", "priority": 1, "time": "1h", "queue": "side", "begin": "2h"}),
        "cancel_job": Good(body={"why": "enough"}),
        "cancel_jobs": Good(body={"jobs": ["2"], "why": "enough"}),
        "job_history": Good(query={"after": 0, "limit": 10}),
        "job_logs": Good(query={"rank": "0", "epoch": epoch, "cursor": "", "limit_bytes": 1000, "tail_bytes": 100}),
        "job_steps": Good(query={"after": "", "rank": "0", "limit": 10}),
        "job_events": Good(query={"after": 0}, headers={"Last-Event-ID": "0"}),
        "all_events": Good(query={"after": 0}, headers={"Last-Event-ID": "0"}),
        "whole_history": Good(query={"after": 0, "node": "n0", "limit": 10}),
        "label_nodes": Good(body={"labels": {"n0": {"rack": "r1", "zone": "z"}}}),
        "drain_node": Good(body={"why": "test", "cordon_only": True}),
        "undrain_node": Good(query={"planned": "false"}),
        "cap_node_power": Good(body={"limit": "300W", "time": "8h"}),
        "put_reservation": Good(
            body={
                "nodes": ["n0"],
                "time": "4h",
                "start_s": SOON_S,
                "users": ["ada"],
                "queues": [],
                "maintenance": False,
                "why": "x",
            }
        ),
        "put_licence": Good(body={"seats": 20}),
        "put_project_secret": Good(body={"value": "a value of no use"}),
        "put_own_secret": Good(body={"value": "a value of no use"}),
        "list_archives": Good(),
        "list_archived_jobs": Good(),
        "put_sign_in": Good(
            body={
                "issuer": "http://127.0.0.1:9",
                "client_id": "phalanx",
                "secret_file": "oidc",
                "url": "http://127.0.0.1:7600",
                "user_claim": "preferred_username",
                "groups_claim": "realm_access.roles",
                "scopes": ["openid", "groups"],
                "recheck_s": 900.0,
                "outage_s": 28_800.0,
                "groups": [{"group": "ml", "role": "user", "projects": ["victims"], "admin_of": []}],
            }
        ),
        "start_device_login": Good(body={"note": "phalanx login on a laptop"}),
        "finish_device_login": Good(body={"handle": "gAAAA", "note": "on a laptop"}),
        "finish_browser_login": Good(body={"code": "c" * 43, "verifier": "v" * 43, "note": "on a laptop"}),
        "put_retention": Good(body={"periods_s": {"logs": 7_776_000.0, "uploads": 604_800.0}}),
        "start_retention_run": Good(body={"older_than_s": 2_592_000.0, "kinds": ["logs"], "dry_run": True}),
        "put_channel": Good(body={"url": "json://127.0.0.1:9/hook", "project": "default", "topics": ["jobs"]}),
        "put_pool": Good(
            body={
                "provider": "virtual",
                "node": "1xh100:8",
                "max_nodes": 2,
                "min_nodes": 0,
                "price_per_h": 2.0,
                "idle": "5m",
                "start_limit": "10m",
                "cap_per_h": 40.0,
            }
        ),
        "check_cloud": Good(body={"provider": "aws", "settings": {"region": "us-east-1"}}),
        "list_services": Good(query={"stopped": "true"}),
        "submit_service": Good(body=SERVICE),
        "change_service": Good(body={"replicas": 2}),
        "report_demand": Good(body={"demand": {"project nlp": 2.5, "key 0a1b": 1.0}}),
        "report_usage": Good(
            body={
                "sequence": 1,
                "hours": [
                    {
                        "id": str(int(time.time() // 3600) * 3600),
                        "uses": [{"service": "web", "project": "nlp", "user": "ada", "requests": 2}],
                        "replicas": [{"service": "web", "job": "1", "busy": 5}],
                    }
                ],
            }
        ),
        "show_load": Good(query={"span_s": 3600.0}),
        "report_tokens": Good(query={"since_s": 1.0, "until_s": 1e10}),
        "report_load": Good(
            body={
                "gateway": "0123456789abcdef",
                "services": [
                    {
                        "service": "web",
                        "in_flight": 3,
                        "waiting": 2,
                        "oldest_wait_s": 0.5,
                        "arrived": 4,
                        "first_tokens": {"50": 2},
                        "unanswered": {"60": 1},
                        "kv": 0.5,
                        "tokens": 90,
                    }
                ],
            }
        ),
        "put_profile": Good(
            body=encode_record(
                Profile(
                    at="2026-11-21",
                    at_s=time.time(),
                    nodes=(NodeMeasurement(node="n0", gpu="virtual", devices=4, virtual=True, memory_bytes_per_s=9.0),),
                )
            )
        ),
        "put_node_tests": Good(
            body={
                "profile": encode_record(
                    Profile(
                        at="2026-11-21",
                        at_s=time.time(),
                        nodes=(
                            NodeMeasurement(node="n0", gpu="virtual", devices=4, virtual=True, memory_bytes_per_s=9.0),
                        ),
                    )
                ),
                "threshold": 0.3,
                "drain": False,
            }
        ),
        "stop_head": Good(body={"keep_jobs": True}),
        "announce_leaving": Good(body={"why": "taken back"}),
        "join": Good(body={"node_id": "n5", "hostname": "h", "address": "10.0.0.1", "devices": 8, "virtual": True}),
        "list_files": Good(query={"path": ""}),
        "archive_files": Good(query={"path": ""}),
        "revoke_token": Good(query={"made_too": "false"}),
        "put_rules": Good(body={"rules": [RULE], "dry_run": False}),
        "list_audit": Good(query={"user": "ada", "since_s": 0.0, "after": 0, "limit": 10}),
        "verify_audit": Good(query={"anchor": "1:" + DIGEST}),
        "put_blob": Good(body=BLOB),
        "put_user": Good(body={"role": "user", "disabled": False}),
        "put_project": Good(body={"members": ["victim"], "admins": ["ada"], "budget": "5000 EUR/month"}),
        "make_token": Good(body={"user": "victim", "expires": "30d", "scope": ["see"], "note": "n"}),
        "put_queues": Good(
            body={"queues": [queue, {"id": "below", "parent": "side"}], "prune": False, "dry_run": False}
        ),
        "put_queue": Good(body={"priority": 1, "open": True}),
        "parse_queues": Good(body=b"queues: {side: {quota: 2}}"),
        "make_plan": Good(body={"model": "gpt2", "gpus": "h100:8", "tokens": "1B", "top": 2}),
        "compare_starts": Good(
            body={"job": FULL_JOB, "add_nodes": 1, "like": "n0", "drain": "n0", "quotas": {"side": 1}}
        ),
    }
