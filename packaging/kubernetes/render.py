# ruff: noqa: INP001  # a program for developers, not a package
"""Write the kustomize base and the Helm chart of a head in a cluster, from the objects that `phalanx up --print all` prints.

    python packaging/kubernetes/render.py [FOLDER]

A test compares them with what is committed.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import phalanx
from phalanx.engines.kubernetes.head_manifests import CLUSTER_DOMAIN, STORAGE, head_objects
from phalanx.engines.kubernetes.head_setup import yaml_text
from phalanx.engines.kubernetes.options import NODE_WAIT, OPTIONS, SHAPE
from phalanx.engines.kubernetes.rights import (
    AUTOSCALER_RIGHTS,
    KUEUE_RIGHTS,
    RIGHTS,
    cluster_role_objects,
    role_objects,
)

IMAGE = f"phalanx:{phalanx.__version__}"
NAMESPACE = "phalanx"
RELEASE_NAMESPACE = "{{ .Release.Namespace }}"
KUSTOMIZATION = """\
# Your own kustomization.yaml: resources with this folder or its address, `namespace`, `images`, and patches for further options of the head.
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: phalanx
resources:
  - rights.yaml
  - head.yaml
"""
CHART = f"""\
apiVersion: v2
name: phalanx
description: A Phalanx head that runs jobs as pods of its namespace, with one Role
type: application
version: {phalanx.__version__}
appVersion: {phalanx.__version__}
"""
VALUES = f"""\
# With Phalanx in it: make image, or make image BASE=IMAGE.
image: {IMAGE}
# Of pods, if it is another one.
podsImage: ""
# Of the head's state.
storage: {STORAGE}
clusterDomain: {CLUSTER_DOMAIN}
# Options of phalanx up for this engine, without their dashes: {", ".join(one.name for one in OPTIONS if one.name.startswith("kubernetes-"))}.
options:
  {SHAPE}: 4x8
# The rights for queues of Kueue.
kueue: false
# A ClusterRole to list nodes and pods. Only an administrator of the cluster can install it.
clusterRole: false
"""
NOTES = """\
kubectl exec -n {{ .Release.Namespace }} phalanx-head-0 -- phalanx status
kubectl exec -n {{ .Release.Namespace }} phalanx-head-0 -- phalanx run --gpus 1 -- nvidia-smi
"""
OPTIONS_BLOCK = """\
            {{- range $name, $value := .Values.options }}
            - --{{ $name }}
            - {{ $value | quote }}
            {{- end }}
"""


def text_of(objects: Iterable[Mapping[str, Any]]) -> str:
    """Return objects as one YAML file."""
    return "---\n".join(yaml_text(one) for one in objects)


def chart_head() -> str:
    """The head with the values of the chart."""
    text = text_of(head_objects(RELEASE_NAMESPACE, "{{ .Values.image }}", {}, storage="{{ .Values.storage }}"))
    last = "            - --kubernetes-image\n            - $(PODS_IMAGE)\n"
    assert text.count(last) == 1, text
    pods_image = "- name: PODS_IMAGE\n              value: '{{ .Values.image }}'"
    assert text.count(pods_image) == 1, text
    text = text.replace(last, last + OPTIONS_BLOCK)
    text = text.replace(pods_image, pods_image.replace(".Values.image", "default .Values.image .Values.podsImage"))
    return text.replace(f"svc.{CLUSTER_DOMAIN}:", "svc.{{ .Values.clusterDomain }}:")


def chart_rights() -> str:
    """The Role with the rights for Kueue where they are asked for, and the ClusterRole."""
    account, role, binding = role_objects(RELEASE_NAMESPACE)
    plain = yaml_text(role).splitlines(keepends=True)
    kueue, waits = (
        "".join(yaml_text(role_objects("x", (*RIGHTS, *more))[1]).splitlines(keepends=True)[len(plain) :])
        for more in (KUEUE_RIGHTS, AUTOSCALER_RIGHTS)
    )
    subject = {"kind": "ServiceAccount", "name": "phalanx", "namespace": RELEASE_NAMESPACE}
    cluster = text_of(cluster_role_objects(subject))
    return (
        f"{yaml_text(account)}---\n{yaml_text(role)}{{{{- if .Values.kueue }}}}\n{kueue}{{{{- end }}}}\n"
        f'{{{{- if index .Values.options "{NODE_WAIT}" }}}}\n{waits}{{{{- end }}}}\n---\n{yaml_text(binding)}'
        f"{{{{- if .Values.clusterRole }}}}\n---\n{cluster}{{{{- end }}}}\n"
    )


def files() -> dict[str, str]:
    """Each file's text, by its path."""
    return {
        "base/kustomization.yaml": KUSTOMIZATION,
        "base/rights.yaml": text_of(role_objects(NAMESPACE)),
        "base/head.yaml": text_of(head_objects(NAMESPACE, IMAGE, {SHAPE: "4x8"})),
        "chart/Chart.yaml": CHART,
        "chart/values.yaml": VALUES,
        "chart/templates/NOTES.txt": NOTES,
        "chart/templates/rights.yaml": chart_rights(),
        "chart/templates/head.yaml": chart_head(),
    }


def main() -> None:
    """Write all files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
