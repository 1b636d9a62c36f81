"""The operator's template of pods: read from YAML, and merged under what the engine needs. Pure but for the file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from phalanx.core.errors import BadFile

CONTAINER: Final = "phalanx"  # name of the supervisor's container
_BYTES_MAX: Final = 256 << 10
_BY_NAME: Final = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}
_OURS: Final = ("restartPolicy", "activeDeadlineSeconds", "hostname", "subdomain", "nodeName")
_KEYS: Final = ("apiVersion", "kind", "metadata", "spec")


def read_template(path: str) -> dict[str, Any]:
    """Return the template in a file; empty for no path.

    Raises:
        BadFile: it cannot be read, is no pod, or sets what the engine decides.
    """
    if not path:
        return {}
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        with open(path, encoding="utf-8") as file:
            found = YAML(typ="safe", pure=True).load(file.read(_BYTES_MAX))
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except (YAMLError, RecursionError) as error:
        raise BadFile(f"{path} is not YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        raise BadFile(f"{path} is no pod: it has no spec", hint="begin with spec:, and below it what a pod's spec has")
    if unknown := [str(key) for key in found if key not in _KEYS]:
        raise BadFile(f"{path}: a pod has no key {unknown[0][:60]}", hint=f"its keys: {', '.join(_KEYS)}")
    if found.get("kind", "Pod") != "Pod":
        raise BadFile(f"{path} is a {str(found['kind'])[:60]}, not a Pod")
    if taken := [key for key in _OURS if key in found["spec"]]:
        raise BadFile(f"{path} sets {taken[0]}, which the engine decides")
    about = found.get("metadata") or {}
    if unknown := [str(key) for key in about if key not in ("labels", "annotations")]:
        raise BadFile(f"{path} sets metadata.{unknown[0][:60]}; a template has labels and annotations")
    for container in found["spec"].get("containers") or ():
        if container.get("name") == CONTAINER and (taken := [key for key in ("command", "args") if key in container]):
            raise BadFile(f"{path} sets {taken[0]} of the container {CONTAINER}, which the engine decides")
    return found


def with_template(pod: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod with the template's settings. A null removes what the engine sets by default, such as `runAsUser`.

    Lists of things with names are merged by these; any other list replaces. What identifies the pod, and the variables of its supervisor,
    stay as they are.
    """
    made: dict[str, Any] = _merge(pod, {key: template[key] for key in ("metadata", "spec") if template.get(key)}, "")
    labels = {**made["metadata"].get("labels", {}), **pod["metadata"]["labels"]}
    made["metadata"] = {**made["metadata"], **pod["metadata"], "labels": labels}
    annotations = {
        **((template.get("metadata") or {}).get("annotations") or {}),
        **pod["metadata"].get("annotations", {}),
    }
    if annotations:
        made["metadata"]["annotations"] = annotations
    ours = pod["spec"]["containers"][0]
    for container in made["spec"]["containers"]:
        if container["name"] == CONTAINER:
            container["env"] = _merge_list(container.get("env", []), ours["env"], "env")
    # The supervisor's container comes first: its state is the pod's for the engine.
    made["spec"]["containers"].sort(key=lambda one: one["name"] != CONTAINER)
    return made


def _merge(below: Any, above: Any, key: str) -> Any:
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        found = dict(copy.deepcopy(dict(below)))
        for name, value in above.items():
            if value is None:
                found.pop(name, None)
            else:
                found[name] = _merge(found.get(name), value, str(name))
        return found
    if isinstance(below, list) and isinstance(above, list) and key in _BY_NAME:
        return _merge_list(below, above, key)
    return copy.deepcopy(above)


def _merge_list(below: list[Any], above: list[Any], key: str) -> list[Any]:
    mark = _BY_NAME[key]
    found = {one.get(mark): one for one in copy.deepcopy(below)}
    for one in above:
        name = one.get(mark)
        # A variable is replaced as a whole: it has either a value or a source.
        found[name] = _merge(found[name], one, "") if name in found and key != "env" else copy.deepcopy(one)
    return list(found.values())
