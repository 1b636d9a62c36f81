"""Creates the provider of resident pods of a head."""

from __future__ import annotations

import os
from collections.abc import Mapping

from phalanx.core.errors import PhalanxError
from phalanx.engines.kubernetes import options as names
from phalanx.engines.kubernetes.engine import FIRST_ANSWER_S
from phalanx.engines.kubernetes.head_setup import TAG_PURPOSE, follows_all, pod_settings
from phalanx.engines.kubernetes.kubeconfig import find_access
from phalanx.engines.kubernetes.resident_pods import ResidentPods
from phalanx.engines.kubernetes.rest import KubernetesApi
from phalanx.ports.engine import EngineContext


def create_resident_pods(
    options: Mapping[str, str], head: EngineContext, *, purpose: str = TAG_PURPOSE
) -> ResidentPods:
    """Create the provider of the pods of one cluster; nothing is started yet. `purpose`: as in `pod_settings`.

    Raises:
        BadFile: the kubeconfig or the pod template is malformed.
        BadRequest: no such context.
    """
    access = find_access(options[names.CONTEXT], os.environ)
    settings = pod_settings(options, head, access, purpose)
    asked = KubernetesApi(access, answer_s=FIRST_ANSWER_S, retry_for_s=FIRST_ANSWER_S)
    try:
        lists_nodes = follows_all(asked, "nodes", settings.namespace)
    except PhalanxError:  # a silent server must not stop a head whose jobs run
        lists_nodes = False
    return ResidentPods(
        api=KubernetesApi(access),
        settings=settings,
        lists_nodes=lists_nodes,
        token_of=head.node_token,
        owner_stays=purpose == TAG_PURPOSE,
    )
