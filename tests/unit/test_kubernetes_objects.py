"""The objects that the Kubernetes engine creates, and how it reads those of others. Schemas are Kubernetes' own, as `kubernetes-validate` has them."""

# Ids are written as plain words here.
# mypy: disable-error-code="arg-type, var-annotated, import-untyped"

import json

import kubernetes_validate
import pytest

from phalanx.core.errors import BadFile
from phalanx.engines.kubernetes import inventory, kueue, render, rights
from phalanx.engines.kubernetes.parse import Taint, parse_node, parse_pod, parse_quantity, tolerates
from phalanx.engines.kubernetes.pod_template import read_template, with_template
from phalanx.engines.kubernetes.render import PodSettings
from tests.builders import job, placed

VERSIONS = [f"1.{minor}" for minor in range(28, 38)]
TEMPLATE = """
metadata:
  labels: {team: vision, phalanx/head: stolen}
  annotations: {cluster-autoscaler.kubernetes.io/safe-to-evict: "false"}
spec:
  runtimeClassName: nvidia
  schedulerName: volcano
  priorityClassName: research
  imagePullSecrets: [{name: registry}]
  nodeSelector: {pool: gpu}
  tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
  securityContext: {runAsUser: null, runAsGroup: 2000}
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
        - matchExpressions: [{key: zone, operator: In, values: [a]}]
  volumes:
  - {name: data, persistentVolumeClaim: {claimName: datasets}}
  - {name: scratch, ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}}, emptyDir: null}
  containers:
  - name: phalanx
    imagePullPolicy: Always
    env: [{name: NCCL_DEBUG, value: INFO}, {name: PHALANX_NODE_ID, value: stolen}]
    volumeMounts: [{name: data, mountPath: /data, readOnly: true}]
    resources: {requests: {ephemeral-storage: 10Gi}}
  - {name: sidecar, image: exporter, securityContext: {allowPrivilegeEscalation: false}}
"""


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "pod.yaml"
    path.write_text(TEMPLATE)
    return read_template(str(path))


def settings(**fields):
    known = {
        "tag": "0a1b2c3d",
        "namespace": "research",
        "image": "registry.example/phalanx:1",
        "head_url": "https://10.0.0.5:7600",
    }
    return PodSettings(**{**known, "ca_pem": "the certificate", **fields})


OWNER = render.owner_reference("phalanx-0a1b2c3d", "6f1c")


def pod(*, pinned=True, template=None, on="n0:0,1 n1:0,1", supervisor_image="", gpus="nvidia.com/gpu", **fields):
    case = placed(job("17", time_limit_s=3600.0, **fields), on=on)
    one, attempt = case.job, case.attempt
    return render.seat_pod(
        settings(template=template or {}, supervisor_image=supervisor_image, gpu_resource=gpus),
        OWNER,
        one,
        attempt,
        attempt.allocation.grants[1],
        pinned=pinned,
    )


def every_object(template):
    case = placed(job("17"))
    subject = {"kind": "User", "name": "ada", "apiGroup": "rbac.authorization.k8s.io"}
    return [
        render.owner_config_map(settings()),
        render.seat_secret(settings(), OWNER, case.attempt, "{}"),
        pod(),
        pod(template=template),
        pod(template=template, supervisor_image="phalanx:1"),
        kueue.attempt_job(settings(), OWNER, case.job, case.attempt, "user-queue"),
        kueue.attempt_job(settings(template=template), OWNER, case.job, case.attempt, "user-queue"),
        *rights.role_objects("research", (*rights.RIGHTS, *rights.KUEUE_RIGHTS, *rights.AUTOSCALER_RIGHTS)),
        *rights.cluster_role_objects(subject),
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_by_the_strict_schemas_of(version, template):
    for item in every_object(template):
        kubernetes_validate.validate(item, version, strict=True)


def test_the_schemas_would_find_a_mistake():
    wrong = pod()
    wrong["spec"]["restartpolicy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_a_pod_of_an_attempt_passes_the_restricted_profile_and_holds_what_was_granted():
    made = pod()
    spec, container = made["spec"], made["spec"]["containers"][0]
    assert made["metadata"]["name"] == "phalanx-0a1b2c3d-j17-e1-n1"
    assert made["metadata"]["ownerReferences"] == [OWNER]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["seccompProfile"]["type"]) == (
        True,
        "RuntimeDefault",
    )
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert (spec["automountServiceAccountToken"], spec["restartPolicy"]) == (False, "Never")
    assert spec["activeDeadlineSeconds"] > 3600
    assert {next(iter(set(volume) - {"name"})) for volume in spec["volumes"]} == {"emptyDir"}


def test_only_the_granted_node_may_run_it_beside_what_the_template_demands(template):
    [term] = pod(template=template)["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]
    assert term["matchExpressions"][0]["key"] == "zone"
    assert "affinity" not in pod(pinned=False)["spec"]


@pytest.mark.parametrize("resource", ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared", "amd.com/gpu"])
def test_slices_and_shared_gpus_are_counted_where_pods_hold_them_and_on_nodes(resource):
    assert pod(gpus=resource)["spec"]["containers"][0]["resources"]["limits"][resource] == "2"
    node = parse_node(
        {"metadata": {"name": "n0"}, "status": {"allocatable": {resource: "7", "nvidia.com/gpu": "1"}}}, resource
    )
    theirs = parse_pod(
        {"metadata": {"name": "x"}, "spec": {"containers": [{"resources": {"limits": {resource: 3}}}]}}, resource
    )
    made = inventory.fleet_node(node, [theirs], granted=frozenset(), our_pods=frozenset(), template={})
    assert (len(made.devices), len(made.foreign_usage.devices)) == (7, 3)


def test_init_containers_and_sidecars_of_others_hold_gpus_as_the_scheduler_counts():
    def held(**spec):
        return parse_pod({"metadata": {"name": "x"}, "spec": spec}, "nvidia.com/gpu").gpus

    two, four = ({"resources": {"limits": {"nvidia.com/gpu": amount}}} for amount in (2, 4))
    assert held(containers=[two, two]) == 4
    assert held(containers=[two], initContainers=[four]) == 4
    assert held(containers=[two], initContainers=[{**two, "restartPolicy": "Always"}]) == 4


@pytest.mark.parametrize("version", [version for version in VERSIONS if int(version[2:]) >= 31])
def test_gpus_are_claimed_by_templates_of_the_namespace_where_they_are_no_resource(version):
    made, case = pod(gpus="claims:h100"), placed(job("17"))
    spec, container = made["spec"], made["spec"]["containers"][0]
    assert spec["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "h100-2"}]
    assert container["resources"]["claims"] == [{"name": "gpus"}]
    assert "claims:h100" not in json.dumps(container["resources"]["limits"])
    kubernetes_validate.validate(made, version, strict=True)
    kubernetes_validate.validate(
        kueue.attempt_job(settings(gpu_resource="claims:h100"), OWNER, case.job, case.attempt, "lq"),
        version,
        strict=True,
    )


def test_the_supervisor_comes_into_an_image_that_knows_nothing_of_it_and_the_pod_stays_restricted():
    spec = pod(supervisor_image="phalanx:1")["spec"]
    [init], main = spec["initContainers"], spec["containers"][0]
    assert (init["image"], main["image"]) == ("phalanx:1", "registry.example/phalanx:1")
    assert main["command"] == ["python3", "/opt/phalanx-supervisor/start.py", "phalanx.app.seat_supervisor"]
    assert init["securityContext"] == main["securityContext"]
    [mount] = init["volumeMounts"]
    assert mount in main["volumeMounts"]
    assert {"name": mount["name"], "emptyDir": {}} in spec["volumes"]


def test_an_init_container_that_fails_is_the_reason_of_its_pod():
    ended = {"exitCode": 1, "reason": "Error", "message": "no space left"}
    status = {
        "phase": "Failed",
        "initContainerStatuses": [{"name": "phalanx-supervisor", "state": {"terminated": ended}}],
        "containerStatuses": [{"name": "phalanx", "state": {"waiting": {"reason": "PodInitializing"}}}],
    }
    made = parse_pod({"metadata": {"name": "p"}, "status": status}, "nvidia.com/gpu")
    assert made.why_ended == "ended as Failed with code 1 (no space left)"


def test_no_secret_is_in_a_pod():
    text = json.dumps([pod(), render.owner_config_map(settings())])
    assert "the certificate" not in text
    assert '"secretKeyRef": {"name": "phalanx-0a1b2c3d-j17-e1", "key": "seat"}' in text


def test_names_of_array_elements_are_names_and_differ():
    assert render.attempt_name(settings(), "17_3", 2) == "phalanx-0a1b2c3d-j17a3-e2"
    assert render.attempt_name(settings(), "17", 3) != render.attempt_name(settings(), "17_3", 3)


def test_a_template_adds_and_replaces_but_the_pod_stays_ours(template):
    made = pod(template=template)
    spec, about, container = made["spec"], made["metadata"], made["spec"]["containers"][0]
    assert (spec["runtimeClassName"], spec["schedulerName"], spec["nodeSelector"]) == (
        "nvidia",
        "volcano",
        {"pool": "gpu"},
    )
    assert (about["labels"]["team"], about["labels"]["phalanx/head"]) == ("vision", "0a1b2c3d")
    assert "cluster-autoscaler.kubernetes.io/safe-to-evict" in about["annotations"]
    assert "phalanx/job-name" in about["annotations"]
    assert [one["name"] for one in spec["containers"]] == ["phalanx", "sidecar"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert (variables["NCCL_DEBUG"], variables["PHALANX_NODE_ID"]) == ("INFO", "n1")
    assert {one["mountPath"] for one in container["volumeMounts"]} == {"/data", "/tmp", "/dev/shm"}
    assert "runAsUser" not in spec["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"]
    scratch = next(one for one in spec["volumes"] if one["name"] == "scratch")
    assert set(scratch) == {"name", "ephemeral"}
    assert container["resources"]["requests"] | {"nvidia.com/gpu": "2"} == container["resources"]["requests"]


def test_the_merge_changes_neither_side(template):
    before, base = json.dumps(template), pod()
    text = json.dumps(base)
    with_template(base, template)
    assert (json.dumps(template), json.dumps(base)) == (before, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no spec"),
        ("spec: []", "has no spec"),
        ("kind: Deployment\nspec: {a: 1}", "is a Deployment"),
        ("spec: {restartPolicy: Always}", "sets restartPolicy"),
        ("spec: {nodeName: n0}", "sets nodeName"),
        ("metadata: {name: x}\nspec: {a: 1}", "sets metadata.name"),
        ("status: {}\nspec: {a: 1}", "no key status"),
        ("spec: {containers: [{name: phalanx, command: [sh]}]}", "sets command"),
        ("spec: [", "not YAML"),
    ],
)
def test_a_template_that_is_none_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    with pytest.raises(BadFile, match=message):
        read_template(str(path))
    with pytest.raises(BadFile, match="cannot read"):
        read_template(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("2", 2),
        ("1500m", 1.5),
        ("64Gi", 64 << 30),
        ("65842748Ki", 65842748 << 10),
        ("5G", 5e9),
        ("1e3", 1000),
        ("", 0),
        (None, 0),
        ("x", 0),
    ],
)
def test_quantities(text, amount):
    assert parse_quantity(text) == amount


def node(**fields):
    status = {
        "allocatable": {"cpu": "63500m", "memory": "512Gi", "nvidia.com/gpu": "8"},
        "conditions": [{"type": "Ready", "status": "True"}],
        "addresses": [{"type": "InternalIP", "address": "10.0.0.7"}],
    }
    labels = {
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.memory": "81559",
        "topology.kubernetes.io/zone": "a",
    }
    return {"metadata": {"name": "n0", "labels": labels}, "spec": {}, "status": status} | fields


def fleet(item, pods=(), template=None, **fields):
    known = {"granted": frozenset(), "our_pods": frozenset()}
    return inventory.fleet_node(
        parse_node(item, "nvidia.com/gpu"), pods, template=template or {}, **{**known, **fields}
    )


def gpu_pod(name, gpus, **about):
    container = {"name": "x", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return parse_pod(
        {
            "metadata": {"name": name, "namespace": "others", "uid": name, **about},
            "spec": {"nodeName": "n0", "containers": [container]},
            "status": {"phase": "Running"},
        },
        "nvidia.com/gpu",
    )


def test_a_node_is_read_with_its_gpus_and_place():
    found = fleet(node())
    assert (found.cpus, found.memory_bytes, len(found.devices)) == (63, 512 << 30, 8)
    assert (found.devices[0].model, found.devices[0].memory_bytes) == ("NVIDIA H100 80GB HBM3", 81559 << 20)
    assert (found.labels, found.address, found.per_attempt, found.cordon) == ({"zone": "a"}, "10.0.0.7", True, None)


def test_gpus_of_other_pods_are_subtracted_and_ours_are_not():
    found = fleet(
        node(),
        [gpu_pod("theirs", 3), gpu_pod("ours", 4)],
        our_pods=frozenset({"ours"}),
        granted=frozenset({0, 1, 2, 3}),
    )
    assert (found.foreign_usage.devices, found.foreign_usage.owners) == ((5, 6, 7), ("pod others/theirs",))
    assert fleet(node(), contended="others").foreign_usage.devices == tuple(range(8))


def test_a_cordon_and_a_taint_take_a_node_out_of_service_unless_tolerated():
    assert "unschedulable" in fleet(node(spec={"unschedulable": True})).cordon.why
    tainted = node(spec={"taints": [{"key": "spot", "value": "yes", "effect": "NoSchedule"}]})
    assert "spot=yes:NoSchedule" in fleet(tainted).cordon.why
    template = {"spec": {"tolerations": [{"key": "spot", "operator": "Exists"}]}}
    assert fleet(tainted, template=template).cordon is None
    assert fleet(node(spec={"taints": [{"key": "spot", "effect": "PreferNoSchedule"}]})).cordon is None


def test_a_node_that_the_templates_selector_excludes_is_not_offered():
    made = parse_node(node(), "nvidia.com/gpu")
    assert inventory.offers_pods(made, {})
    assert not inventory.offers_pods(made, {"spec": {"nodeSelector": {"pool": "gpu"}}})
    control = parse_node(
        node(spec={"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]}),
        "nvidia.com/gpu",
    )
    assert not inventory.offers_pods(control, {})


def test_tolerations_are_compared_as_kubernetes_does():
    taint = Taint(key="a", value="b", effect="NoExecute")
    assert tolerates([{"operator": "Exists"}], taint)
    assert tolerates([{"key": "a", "value": "b"}], taint)
    assert not tolerates([{"key": "a", "value": "c"}], taint)
    assert not tolerates([{"key": "a", "operator": "Exists", "effect": "NoSchedule"}], taint)


def test_an_object_with_almost_nothing_in_it_is_read():
    assert parse_pod({}, "x").phase == "Pending"
    assert parse_node({"metadata": None}, "x").not_ready == "not ready"
    strange = {
        "metadata": {"labels": {"phalanx/epoch": "x", "phalanx/job": None}},
        "status": {"containerStatuses": None},
    }
    assert parse_pod(strange, "x").epoch == 0


def test_the_reason_of_an_end_and_of_waiting_is_read():
    status = {
        "phase": "Failed",
        "reason": "Evicted",
        "message": "The node was low on\nresource: memory.",
        "containerStatuses": [{"name": "phalanx", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}],
    }
    found = parse_pod({"status": status}, "x")
    assert found.why_ended == "ended as Evicted with code 137 (The node was low on resource: memory.)"
    waiting = {
        "containerStatuses": [
            {"name": "phalanx", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
        ]
    }
    assert parse_pod({"status": waiting}, "x").waiting == "ErrImagePull"


def test_rights_are_granted_once_each():
    [_, role, binding] = rights.role_objects("research")
    rules = {rule["resources"][0]: rule["verbs"] for rule in role["rules"]}
    assert rules["pods"] == ["create", "get", "list", "watch", "delete", "deletecollection"]
    assert set(rules) == {"pods", "configmaps", "secrets"}
    assert binding["subjects"][0]["kind"] == "ServiceAccount"
