"""Records as small as the store's tests need them, and a dump of all that a store says."""

import hashlib
from dataclasses import replace

from phalanx.core.fleet.custom_failure_rules import FailureRules
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.documents import FleetDocument
from phalanx.core.fleet.node import Cordon, Node, NodeState
from phalanx.core.fleet.node_console import NodeConsole
from phalanx.core.fleet.node_pool import (
    MonthCharge,
    NodeOffer,
    NodePool,
    NodeTemplate,
    OfferRefusal,
    PaidBy,
    PoolNode,
    PoolNodeState,
)
from phalanx.core.fleet.node_tests import NodeRate, NodeTest, NodeTestHistory
from phalanx.core.ids import (
    Epoch,
    Generation,
    JobId,
    NodeId,
    PoolId,
    ProjectId,
    QueueId,
    ReservationId,
    ServiceId,
    TokenId,
    UserId,
)
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import RECORDS, Idempotency
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.attempt import Attempt, EndCause
from phalanx.core.work.burst_rule import BurstRule
from phalanx.core.work.channel import Channel, ChannelMark, ChannelTopic
from phalanx.core.work.extras import Licence
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Project, Queue, QueueUsage
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.retention import RetainedFiles, RetentionPolicy
from phalanx.core.work.secret import Secret, SecretScope, secret_id
from phalanx.core.work.services.canary import Canary, Evidence
from phalanx.core.work.services.request_limits import RequestLimits
from phalanx.core.work.services.rollout_terms import RolloutTerms
from phalanx.core.work.services.scale_terms import ScaleTerms
from phalanx.core.work.services.service import Revision, Service
from phalanx.core.work.services.service_terms import ServiceTerms
from phalanx.core.work.services.service_use import BatchUse, GatewayMark, ReplicaUse, ServiceUse, ServiceUseHour
from phalanx.core.work.sign_in import GroupGrant, SignInSettings
from phalanx.core.work.spec import JobSpec, Role
from phalanx.core.work.states import AttemptState, JobState
from phalanx.core.work.usage.attempt_use import AttemptUse, DeviceUse, NodeUse
from phalanx.core.work.usage.electricity import ElectricityRate
from phalanx.core.work.usage.monthly_budget import BudgetWarning, MonthlyBudget
from phalanx.core.work.usage.price_list import GpuPrice, PriceList
from phalanx.core.work.usage.usage_hour import USAGE_MARK, CountedNode, UsageHour, UsageMark, UsageRow
from phalanx.core.work.usage.waste_terms import IdleAction, IdlePolicy, WasteKind
from phalanx.core.work.users import (
    Action,
    Identity,
    Token,
    User,
    UserRole,
)
from phalanx.ports.store import Batch, JobFilter

PENDING, RUNNING, SUCCEEDED, FAILED = JobState.PENDING, JobState.RUNNING, JobState.SUCCEEDED, JobState.FAILED


def job(seq, state=PENDING, *, epoch=0, user="ann", project="vision", queue="default", name="train", **more):
    spec = JobSpec(
        name=name,
        role=Role(argv=("python", "train.py"), gpus=GpuRequest(total=8)),
        workdir="/work/ünïcode",
        env=(("SEED", "1"),),
    )
    return Job(
        id=JobId(str(seq)),
        folder=f"{seq}-k",
        seq=seq,
        spec=spec,
        user=UserId(user),
        project=ProjectId(project),
        queue=QueueId(queue),
        submit_s=1000.5 + seq,
        state=state,
        epoch=Epoch(epoch),
        ended_s=2000.0 + seq if state.terminal else None,
        **more,
    )


def attempt(seq, epoch=1, state=AttemptState.RUNNING, *, node="n0", devices=(0, 1)):
    grant = NodeGrant(
        node_id=NodeId(node),
        node_rank=0,
        devices=tuple(devices),
        cpus=4,
        memory_bytes=2**30,
        tasks=len(devices),
        first_rank=0,
    )
    return Attempt(
        job_id=JobId(str(seq)),
        epoch=Epoch(epoch),
        folder=f"{seq}-k/epoch-{epoch}-k",
        allocation=Allocation(grants=(grant,)),
        placed_s=1100.0,
        state=state,
        causes=(EndCause.NODE_FAIL,) if state is AttemptState.ENDED else (),
    )


def node(name="n0", **more):
    devices = tuple(
        Device(index=i, uuid=f"{name}-{i}", model="h200", memory_bytes=2**37, virtual=True) for i in range(4)
    )
    return Node(
        id=NodeId(name),
        engine="local",
        devices=devices,
        cpus=16,
        memory_bytes=2**36,
        state=NodeState.UP,
        labels={"rack": "r1"},
        **{"version": "0.1.0", **more},
    )


def user(name="ann", role=UserRole.USER):
    return User(id=UserId(name), role=role, created_s=1.0)


def token(name="t1", owner="ann", **more):
    sha256 = more.pop("sha256", hashlib.sha256(name.encode()).hexdigest())
    return Token(id=TokenId(name), user=UserId(owner), sha256=sha256, created_s=more.pop("created_s", 5.0), **more)


def scoped_token():
    limits = RequestLimits(requests_per_minute=6)
    scope = frozenset({Action.VIEW, Action.SUBMIT})
    return token("t9", scope=scope, expires_s=9.5, request_limits=limits, limited_as=TokenId("t1"))


def project(name="vision"):
    return Project(
        id=ProjectId(name),
        members=frozenset({UserId("ann"), UserId("bob")}),
        created_s=2.0,
        budget=MonthlyBudget(cents=500_000, currency="EUR"),
        budget_warned=BudgetWarning(month="2026-11", percent=80),
        outputs_bytes=5 << 30,
        outputs_warned=80,
        request_limits=RequestLimits(requests_per_minute=60, tokens_per_minute=200_000),
        request_weight=2.5,
        burst=BurstRule(wait_s=60.5),
    )


def queue(name="default", **more):
    policy = IdlePolicy(action=IdleAction.RELEASE, after_s=1800.5, states=(WasteKind.IDLE, WasteKind.LOW), exempt="a=b")
    alarms = ((WasteKind.IDLE, 60.0), (WasteKind.LOW, None))
    rule = BurstRule(wait_s=7200.5, price=2.25, per_gpu_h=True)
    return Queue(
        id=QueueId(name),
        **{
            "idle": policy,
            "alarms": alarms,
            "burst": rule,
            "min_stay_s": 90.5,
            "fair_users": True,
            "half_life_s": 3600.5,
            **more,
        },
    )


def spent(name="default", **more):
    return QueueUsage(
        queue=QueueId(name),
        at_s=more.pop("at_s", 1100.5),
        period_s=0.0,
        gpu_s=3600.25,
        decayed_gpu_s=1 / 3,
        users=((UserId("ann"), 2 / 3),),
        **more,
    )


def reservation(name="fans", **more):
    return Reservation(
        id=ReservationId(name),
        nodes=(NodeId("n0"), NodeId("n1")),
        start_s=100.0,
        end_s=200.5,
        users=frozenset({UserId("ann")}),
        queues=frozenset({QueueId("default")}),
        why="neue Lüfter",
        by=UserId("opal"),
        open_cordoned=True,
        cordons=((NodeId("n1"), Cordon(by="opal", why="Lüfter", since_s=90.5, drain=True)),),
        **more,
    )


def canary():
    evidence = Evidence(errors=(0.5, -1.25, 2.0, 3.0), speeds=(0.25, 0.0, 0.0, -4.0))
    counts = {"answered": 120, "errors": 3, "stable_answered": 2400, "stable_errors": 1}
    return Canary(
        revision=3, stable=2, share=50, planned=100, step_s=1001.5, completing=True, evidence=evidence, **counts
    )


def service(name="web", **fields):
    return Service(
        id=ServiceId(name),
        user=UserId("ann"),
        project=ProjectId("vision"),
        queue=QueueId("default"),
        created_s=1000.5,
        **{"revision": 1, "last_revision": 1, **fields},
    )


def revision(number=1):
    scale = ScaleTerms(ttft_s=0.5, queue_s=2.0, kv=0.8, in_flight=16, idle_s=60.0)
    rollout = RolloutTerms(first=50, last=500, step_s=120.0)
    terms = ServiceTerms(replicas_min=1, replicas_max=4, ready="/health", scale=scale, rollout=rollout)
    spec = replace(job(1).spec, name="web", service=terms)
    return Revision(service=ServiceId("web"), number=number, spec=spec, by=UserId("ann"), created_s=1000.5)


def calibration(by="opal", profile='{"at":"2026-11-21"}'):
    return FleetDocument(text=profile, by=UserId(by), at_s=7.5)


def failure_rules(by="opal", rules="[]"):
    return FailureRules(rules=rules, by=UserId(by), at_s=8.5)


def node_pool(name="burst"):
    device = Device(index=0, uuid="", model="virtual", memory_bytes=1, virtual=True)
    return NodePool(
        id=PoolId(name),
        provider="virtual",
        template=NodeTemplate(
            text="1",
            devices=(device,),
            cpus=2,
            memory_bytes=3,
            offers=(NodeOffer(text="a spot", zone="a", price_per_h=2.5),),
            listed=True,
        ),
        min_nodes=0,
        max_nodes=4,
        price_per_h=2.5,
        idle_s=300.0,
        start_limit_s=600.0,
        by=UserId("opal"),
        settings=(("script", "vms"),),
        cap_per_h=40.5,
        refusals=(OfferRefusal(offer="a spot", why="no capacity", at_s=6.5),),
        list_problem="no rights",
        egress_per_gb=0.09,
        billed=PaidBy.HOUR,
        cap_per_month=20_000.5,
        charged=MonthCharge(month="2026-11", usd=12.25),
        boot_s=240.5,
    )


def pool_node(name="burst-0"):
    return PoolNode(
        id=NodeId(name),
        pool=PoolId("burst"),
        token="burst-0-h1",
        state=PoolNodeState.REQUESTED,
        requested_s=8.0,
        changed_s=8.5,
        why="job 1 waits for capacity",
        offer="a spot",
        price_per_h=2.5,
        machine="i-1",
        machine_since_s=8.25,
        ever_unanswered=True,
        unanswered=2,
        problem="timed out",
    )


def key(seq, owner="ann", word=None):
    return Idempotency(
        user=UserId(owner), key=word or f"key-{seq}", body_sha256="0" * 64, job_id=JobId(str(seq)), at_s=3.0
    )


def line(seq, job_id=None, node_id=None, kind="submitted"):
    return HistoryLine(
        seq=seq,
        at_s=1000.0 + seq,
        kind=kind,
        text=f"line {seq}",
        job_id=JobId(str(job_id)) if job_id else None,
        node_id=NodeId(node_id) if node_id else None,
        facts={"step": 7, "loss": 0.25, "none": None, "word": "x"},
    )


def one_of_each_kind():
    """A record of each kind; each comes after those that it refers to."""
    identity = Identity(
        issuer="https://id.example.org",
        subject="a1",
        confirmed_s=4.0,
        lapses_s=5.5,
        projects=frozenset({ProjectId("nlp")}),
        sealed="gAAAA",
        ended="left",
    )
    people = (replace(user(), identity=identity), project(), token(), queue(), spent(), reservation())
    return (
        *people,
        calibration(),
        failure_rules(),
        node(),
        node_pool(),
        pool_node(),
        NodeConsole(id=NodeId("burst-0"), pool=PoolId("burst"), machine="i-1", at_s=9.0, text="no driver\n"),
        NodeTestHistory(id=NodeId("n0")).add(
            NodeTest(
                at_s=6.0,
                by=UserId("opal"),
                job="1",
                gpu="virtual",
                devices=2,
                threshold=0.3,
                peers=3,
                rates=(NodeRate(what="memory", value=1e9, median=2e9, why="memory 50% below the median of 3 nodes"),),
            )
        ),
        Licence(id="matlab", total=20),
        RetentionPolicy(periods=((RetainedFiles.LOGS, 7_776_000.0),), by=UserId("root"), at_s=5.0),
        Secret(
            id=secret_id(SecretScope.PROJECT, "vision", "HF_TOKEN"),
            scope=SecretScope.PROJECT,
            owner="vision",
            name="HF_TOKEN",
            sealed="c2VhbGVk",
            key="0123456789abcdef",
            version=2,
            by=UserId("ann"),
            at_s=7.5,
        ),
        SignInSettings(
            issuer="https://id.example.org",
            client_id="phalanx",
            urls=("https://gpu-head:7600",),
            by=UserId("root"),
            at_s=5.0,
            secret_file="oidc",
            scopes=("openid", "groups"),
            grants=(
                GroupGrant(
                    group="ml", role=UserRole.USER, projects=frozenset({ProjectId("nlp")}), admin_of=frozenset()
                ),
            ),
        ),
        Channel(
            id="ops",
            url="json://user:secret@example.org",
            shown="json://user:****@example.org",
            project=ProjectId("nlp"),
            topics=(ChannelTopic.JOBS, ChannelTopic.WASTE),
            by=UserId("root"),
            created_s=6.0,
        ),
        ChannelMark(id="ops", seq=7, digest="2026-10"),
        price_list(),
        usage_hour(),
        UsageMark(
            id=USAGE_MARK,
            until_ms=7_200_250,
            nodes=(CountedNode(id=NodeId("n0"), devices=(0,), model="h100", pool=""),),
        ),
        attempt_use(1),
        service_use_hour(),
        GatewayMark(id="0a1b", sequence=7, at_s=9.5),
        job(1, RUNNING, epoch=1),
        attempt(1),
        service(scale=2, load_replicas=3, load_why="2.4s queue wait at 2 replicas", load_s=1001.5),
        service("canary", revision=3, last_revision=3, served_revision=2, canary=canary()),
        revision(),
        key(1),
    )


def attempt_use(seq, epoch=1):
    device = DeviceUse(node=NodeId("n0"), index=0, observed_ms=1000, busy_ms=250.5, peak=0.9, memory_peak_bytes=1 << 30)
    node = NodeUse(node=NodeId("n0"), generation=Generation(1), earlier_cpu_s=1.5, memory_peak_bytes=1 << 33)
    return AttemptUse(job_id=JobId(str(seq)), epoch=Epoch(epoch), counter="nvml_gpu", devices=(device,), nodes=(node,))


def price_list():
    prices = (
        GpuPrice(gpu="h100", from_s=0, micro=2_490_000),
        GpuPrice(gpu="h100", pool="cloud", from_s=3600, micro=6_880_001, source="offer of 9 November"),
    )
    rates = (
        ElectricityRate(from_s=0, micro_per_kwh=180_000, pue_milli=1250, gco2_milli_per_kwh=344_500, source="grid"),
    )
    return PriceList(currency="EUR", prices=prices, by=UserId("opal"), at_s=9.5, electricity=rates)


def usage_hour(begin_s=3600):
    row = UsageRow(
        model="h100", pool="", project="vision", user="ann", queue="default", job="1", amounts=(("idle", "", 250_000),)
    )
    return UsageHour(id=str(begin_s), fleet=250_000, rows=(row,))


def service_use_hour():
    use = ServiceUse(
        service=ServiceId("chat"),
        project=ProjectId("nlp"),
        user=UserId("ann"),
        requests=3,
        estimated=1,
        prompt_tokens=400,
        answer_tokens=70,
        stream_ms=900,
        kv_token_ms=12_345,
    )
    replica = ReplicaUse(service=ServiceId("chat"), job=JobId("1"), busy=800_000)
    batch = BatchUse(
        service=ServiceId("chat"),
        job=JobId("9"),
        project=ProjectId("nlp"),
        user=UserId("ann"),
        requests=2,
        prompt_tokens=50,
        answer_tokens=7,
    )
    return ServiceUseHour(id="7200", uses=(use,), replicas=(replica,), batches=(batch,))


def submitted(first, count=1):
    """The batch that submits jobs `first ... first + count - 1`, when as many history lines stand before it as jobs."""
    seqs = range(first, first + count)
    return Batch(
        records=[record for seq in seqs for record in (job(seq), key(seq))], history=[line(seq, seq) for seq in seqs]
    )


def dump(store):
    """All that a store answers."""
    jobs = store.jobs(JobFilter(limit=10_000))
    return {
        "world": store.load(),
        "jobs": jobs,
        "counts": store.job_counts(),
        "attempts": {job.id: store.attempts(job.id) for job in jobs},
        "history": store.history(limit=100_000),
        "reservations": store.reservations(),
        "records": {kind.table: store.records(kind) for kind in RECORDS},
    }
