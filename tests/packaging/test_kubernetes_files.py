"""What runs a head in a cluster: the YAML of `up --print all`, the kustomize base, and the Helm chart. Read by the current kubectl and helm where they are."""

# mypy: disable-error-code="import-untyped"

import contextlib
import io
import json
import runpy
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from phalanx.app.options import parse_arguments
from phalanx.cli.root import main as command_line
from phalanx.engines.kubernetes.head_manifests import head_objects
from phalanx.engines.kubernetes.options import OPTIONS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "packaging/kubernetes"
KUBECTL, HELM = (shutil.which(name, path=str(ROOT / "build/kubectl")) for name in ("kubectl", "helm"))
NEEDS = pytest.mark.skipif(KUBECTL is None or HELM is None, reason="needs kubectl and helm: make kubectl-tools")
RIGHTS = ("ServiceAccount", "Role", "RoleBinding")


def read(text):
    return [one for one in YAML(typ="safe", pure=True).load_all(io.StringIO(text)) if one]


def by_kind(objects):
    return {one["kind"]: one for one in objects}


def called(*words, text=""):
    done = subprocess.run(words, capture_output=True, text=True, check=False, input=text, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def asked(*words):
    """Exit code and output of `phalanx up --print`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command_line(["up", "--engine", "kubernetes", "--namespace", "research", *words, "--print", "all"])
    return code, out.getvalue(), err.getvalue()


def printed(*words):
    code, text, error = asked(*words)
    assert code == 0, error
    return text


def test_the_committed_files_are_what_the_code_renders(monkeypatch):
    monkeypatch.setattr("sys.argv", ["render.py"])
    wanted = runpy.run_path(str(FOLDER / "render.py"))["files"]()
    found = {str(path.relative_to(FOLDER)): path.read_text() for path in FOLDER.glob("*/**/*") if path.is_file()}
    assert found == wanted, "run: python packaging/kubernetes/render.py"


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_the_objects_are_valid_and_pass_the_restricted_profile(version):
    objects = head_objects("research", "registry.example/phalanx:1", {"kubernetes-nodes": "4x8"})
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)
    spec = objects[1]["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    [container] = spec["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_the_command_is_one_that_the_head_understands(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    text = printed("--kubernetes-image", "reg/phalanx:1", "--kubernetes-nodes", "4x8", "--kubernetes-node-wait", "15m")
    found = by_kind(read(text))
    assert set(found) == {*RIGHTS, "Service", "StatefulSet"}
    [container] = found["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    values = {one["name"]: one.get("value", "research") for one in container["env"]}
    words = list(container["command"])
    for name, value in values.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert words[:3] == ["phalanx", "up", "--foreground"]
    given = parse_arguments(words[3:])
    assert given.listen == "phalanx-head-0.phalanx-head.research.svc.cluster.local:7600"
    assert {option.name: getattr(given, option.name.replace("-", "_")) for option in OPTIONS} == {
        **dict.fromkeys((option.name for option in OPTIONS), None),
        "namespace": "research",
        "kubernetes-image": "reg/phalanx:1",
        "kubernetes-nodes": "4x8",
        "kubernetes-node-wait": "15m",
    }
    service = found["Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "needs an image"),
        (("--kubernetes-image", "x", "--kubernetes-template", "pod.yaml"), "a file of this machine"),
    ],
)
def test_what_a_head_in_the_cluster_cannot_have_is_refused(words, why, tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    code, text, error = asked(*words)
    assert (code, text) == (64, "")
    assert why in error


@NEEDS
@pytest.mark.prove
def test_the_current_kubectl_reads_every_object(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    text = printed("--kubernetes-image", "reg/phalanx:1", "--kubernetes-queue", "research")
    read_back = called(KUBECTL, "label", "--local", "--filename", "-", "seen=yes", "--output", "json", text=text)
    at, found = 0, []
    while at < len(read_back):
        one, at = json.JSONDecoder().raw_decode(read_back, at)
        found.append(one)
        at += len(read_back[at:]) - len(read_back[at:].lstrip())
    assert [one["kind"] for one in found] == [one["kind"] for one in read(text)]
    assert all(one["metadata"]["labels"]["seen"] == "yes" for one in found)


@NEEDS
@pytest.mark.prove
def test_kustomize_moves_the_base_to_another_namespace(tmp_path):
    shutil.copytree(FOLDER / "base", tmp_path / "base")
    (tmp_path / "kustomization.yaml").write_text(
        "namespace: research\nresources: [base]\nimages: [{name: phalanx, newName: reg/phalanx, newTag: '2'}]\n"
    )
    found = by_kind(read(called(KUBECTL, "kustomize", str(tmp_path))))
    assert set(found) == {*RIGHTS, "Service", "StatefulSet"}
    assert {one["metadata"]["namespace"] for one in found.values()} == {"research"}
    assert found["RoleBinding"]["subjects"][0]["namespace"] == "research"
    [container] = found["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "reg/phalanx:2"


@NEEDS
@pytest.mark.prove
def test_the_chart_renders_what_the_command_prints(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path))
    called(HELM, "lint", str(FOLDER / "chart"))
    words = ("--kubernetes-queue", "research", "--kubernetes-nodes", "4x8", "--kubernetes-node-wait", "15m")
    values = ("kubernetes-nodes=4x8", "kubernetes-queue=research", "kubernetes-node-wait=15m")
    sets = ("image=reg/phalanx:1", "kueue=true", *(f"options.{one}" for one in values))
    chart = called(
        HELM, "template", "x", str(FOLDER / "chart"), "-n", "research", *(w for one in sets for w in ("--set", one))
    )
    wanted, found = by_kind(read(printed("--kubernetes-image", "reg/phalanx:1", *words))), by_kind(read(chart))
    for one in (wanted, found):
        [container] = one["StatefulSet"]["spec"]["template"]["spec"]["containers"]
        container["command"] = sorted(container["command"])
    assert found == wanted
    plain = read(called(HELM, "template", "x", str(FOLDER / "chart"), "-n", "research", "--set", "clusterRole=true"))
    assert [one["kind"] for one in plain if one["kind"].startswith("Cluster")] == ["ClusterRole", "ClusterRoleBinding"]
    for one in plain:
        kubernetes_validate.validate(one, "1.35", strict=True)
