"""Kueue and the controller of Jobs on the fake cluster, as their documents describe them: the test decides what Kueue admits and stops.

The objects and their fields follow Kueue's pages on troubleshooting and on pending workloads, and its controller of Jobs: it stops a Job by
`suspend` with the annotation `kueue.x-k8s.io/stopping`, which it then removes.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import uuid
from dataclasses import dataclass, field

from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.fake_store import KINDS, Item, Refused, set_condition

JOBS, PODS, WORKLOADS = KINDS["batch", "jobs"], KINDS["", "pods"], KINDS["kueue.x-k8s.io", "workloads"]
QUEUE = "kueue.x-k8s.io/queue-name"
INDEX = "batch.kubernetes.io/job-completion-index"
PENDING = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in flavor h100, 2 more needed"


@dataclass
class FakeKueue:
    """Attributes: `makes_pods`: the controller of Jobs does its work."""

    api: FakeApi
    makes_pods: bool = True
    ended: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Serve Kueue's API, and run both controllers."""
        self.api.groups["kueue.x-k8s.io"] = "v1beta1"
        self.thread = threading.Thread(target=self._run, name="fake-kueue", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End both controllers."""
        self.ended.set()
        with self.api.store.lock:
            self.api.store.lock.notify_all()
        assert self.thread is not None
        self.thread.join()

    # ---- what Kueue decides ---------------------------------------------------------------------------------------------

    def jobs(self) -> list[Item]:
        """The Jobs in queues."""
        return self.api.store.select(JOBS, "", QUEUE, "")[0]

    def admit(self, job: Item) -> None:
        """Reserve quota, and start the Job."""
        self._set(job, ("QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue cluster-queue"))
        self._set(job, ("Admitted", "True", "Admitted", "The workload is admitted"))
        self._patch(job, {"spec": {"suspend": False}})

    def preempt(self, job: Item) -> None:
        """Stop the Job for one of a higher priority."""
        self._set(job, ("Evicted", "True", "Preempted", "Preempted to accommodate a higher priority Workload"))
        self._patch(job, {"spec": {"suspend": True}, "metadata": {"annotations": {"kueue.x-k8s.io/stopping": "true"}}})
        self._patch(job, {"metadata": {"annotations": {"kueue.x-k8s.io/stopping": None}}})
        self._set(job, ("QuotaReserved", "False", "Pending", PENDING), ("Admitted", "False", "NoReservation", ""))

    def say(self, job: Item, reason: str, message: str) -> None:
        """Give a reason why the Job is not admitted."""
        self._set(job, ("QuotaReserved", "False", reason, message))

    def show_positions(self, queue: str, *jobs: Item) -> None:
        """Serve the order of a queue, as Kueue's visibility API does."""
        self.api.groups["visibility.kueue.x-k8s.io"] = "v1beta1"
        items = [
            {
                "metadata": {"name": f"job-{job['metadata']['name']}-8d56e", "ownerReferences": [_owner(job)]},
                "priority": 0,
                "localQueueName": queue,
                "positionInClusterQueue": place,
                "positionInLocalQueue": place,
            }
            for place, job in enumerate(jobs)
        ]
        path = f"/apis/visibility.kueue.x-k8s.io/v1beta1/namespaces/default/localqueues/{queue}/pendingworkloads"
        self.api.answers[path] = {"kind": "PendingWorkloadsSummary", "items": items}

    # ---- controllers ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        seen = -1
        while not self.ended.is_set():
            with self.api.store.lock:
                if self.api.store.version == seen:
                    self.api.store.lock.wait(0.5)
                seen = self.api.store.version
            for job in self.api.store.select(JOBS, "", "", "")[0]:
                with contextlib.suppress(Refused):  # it went meanwhile
                    if job["metadata"].get("labels", {}).get(QUEUE):
                        self._make_workload(job)
                    if self.makes_pods:
                        self._control(job)

    def _make_workload(self, job: Item) -> None:
        name = self._workload(job)
        with contextlib.suppress(Refused):
            item = {
                "metadata": {
                    "name": name,
                    "labels": {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]},
                    "ownerReferences": [_owner(job)],
                },
                "spec": {"active": True, "queueName": job["metadata"]["labels"][QUEUE]},
            }
            self.api.store.create(WORKLOADS, job["metadata"]["namespace"], item)
            self._set(job, ("QuotaReserved", "False", "Pending", PENDING))

    def _control(self, job: Item) -> None:
        store, namespace, status = self.api.store, job["metadata"]["namespace"], job.setdefault("status", {})
        pods = store.select(PODS, namespace, f"batch.kubernetes.io/controller-uid={job['metadata']['uid']}", "")[0]
        over = any(
            one["status"] == "True" and one["type"] in ("Failed", "Complete") for one in status.get("conditions", ())
        )
        failed = [
            one
            for one in pods
            if one["status"]["phase"] == "Failed"
            or ("deletionTimestamp" in one["metadata"] and one["status"]["phase"] != "Succeeded")
        ]
        if job["spec"].get("suspend") or over:
            self._delete(pods)
        elif len(failed) > job["spec"]["backoffLimit"]:
            set_condition(job, "Failed", "True", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
            store.merge(JOBS, namespace, job["metadata"]["name"], {"status": status}, part="status")
            self._delete(pods)
        elif sum(one["status"]["phase"] == "Succeeded" for one in pods) == job["spec"]["completions"]:
            set_condition(job, "Complete", "True")
            store.merge(JOBS, namespace, job["metadata"]["name"], {"status": status}, part="status")
        else:
            there = {one["metadata"]["annotations"][INDEX] for one in pods}
            for index in map(str, range(job["spec"]["completions"])):
                if index not in there:
                    self._make_pod(job, index)

    def _make_pod(self, job: Item, index: str) -> None:
        template, about = copy.deepcopy(job["spec"]["template"]), job["metadata"]
        meta = template["metadata"]
        meta["name"] = f"{about['name']}-{index}-{uuid.uuid4().hex[:5]}"
        meta["labels"] |= {
            "batch.kubernetes.io/controller-uid": about["uid"],
            "batch.kubernetes.io/job-name": about["name"],
        }
        meta["annotations"] = {**meta.get("annotations", {}), INDEX: index}
        meta["ownerReferences"] = [{**_owner(job), "controller": True}]
        with contextlib.suppress(Refused):  # a quota: the real controller tries again later
            self.api.store.create(PODS, about["namespace"], template)

    def _delete(self, pods: list[Item]) -> None:
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] not in ("Succeeded", "Failed"):
                self.api.store.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], {})

    def _set(self, job: Item, *conditions: tuple[str, str, str, str]) -> None:
        found = self.api.store.get(WORKLOADS, job["metadata"]["namespace"], self._workload(job))
        for kind, value, reason, message in conditions:
            set_condition(found, kind, value, reason, message)
        change = {"status": {**found["status"]}}
        self.api.store.merge(WORKLOADS, job["metadata"]["namespace"], self._workload(job), change, part="status")

    def _patch(self, job: Item, change: Item) -> None:
        self.api.store.merge(JOBS, job["metadata"]["namespace"], job["metadata"]["name"], change)

    def _workload(self, job: Item) -> str:
        return f"job-{job['metadata']['name']}-{job['metadata']['uid'][:5]}"


def _owner(job: Item) -> Item:
    about = job["metadata"]
    return {"apiVersion": "batch/v1", "kind": "Job", "name": about["name"], "uid": about["uid"]}
