"""What the preparation and the start of a member use of their node, and what a member gets of it: devices, environment, folders, streams."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phalanx.node.data.held_datasets import HeldDatasets
from phalanx.node.files.job_accounts import (
    SINGLE_ACCOUNT,
    JobAccountPolicy,
    make_owned_folder,
)
from phalanx.node.head_link.head_connection import HeadAccess
from phalanx.node.logic.accounts import login_environment
from phalanx.node.logic.images import RuntimeKind
from phalanx.node.logic.output_mask import OutputMasker
from phalanx.node.logic.utf8 import replace_invalid_utf8
from phalanx.node.logic.variables.environment import MemberFolders, NodeContext
from phalanx.node.logic.variables.mpi_variables import needs_agent
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.member.rank_reports import RankReport
from phalanx.node.member.spare_scratch import SpareScratch
from phalanx.node.mig.slice_keeper import SliceKeeper
from phalanx.node.mpi.mpi_rank import agent_path
from phalanx.node.prepare.data_mounts import DataMounts
from phalanx.node.prepare.data_server import DataServers
from phalanx.node.prepare.hook_runner import OperatorHooks
from phalanx.node.prepare.mps_daemons import MpsDaemons
from phalanx.node.prepare.rendezvous_port import has_ipv6
from phalanx.node.probes.devices import DeviceFacts, DeviceReading
from phalanx.node.probes.preflight_checks import PreflightChecks
from phalanx.node.processes.attempt_processes import (
    ProcessHost,
)
from phalanx.node.processes.zygote import Zygotes
from phalanx.node.transfer.checkpoint_upload import CheckpointUploader
from phalanx.node.transfer.output_sync import OutputSync
from phalanx.node.transfer.spool import Spool
from phalanx.node.transfer.stream_upload import StreamName, StreamUploader


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeServices:
    """The services of the node that preparation and start use.

    Attributes:
        devices: the node's inventory.
        fresh_samples: returns device samples taken after the call, by index.
        on_report: receives the reports of a member's ranks.
        sees_head_files: whether the head's folders are visible here; None if the head cannot tell.
        cache: the node's cache folder, shared by attempts.
        preflight_checks: the node's preflight checks.
        mps: the daemons of shared devices.
        slices: makes and removes MIG slices; None if no device can be divided.
        hooks: the programs of the node's operator.
        spares: scratch folders of ended attempts, for the next ones.
        data_servers: serve chunks of datasets to other nodes.
        held_datasets: the datasets of which the node has a copy.
        data_mounts: mount object stores.
        clock_offset_s: how far our wall clock is ahead of the head's.
        accounts: the account policy; its `folder` holds the files of other accounts' jobs, `folder` here holds ours.
    """

    node_key: str
    access: HeadAccess
    base: Mapping[str, str]
    virtual: bool
    devices: tuple[DeviceFacts, ...]
    fresh_samples: Callable[[float], Mapping[int, DeviceReading]]
    host: ProcessHost
    zygotes: Zygotes
    spool: Spool
    shipper: StreamUploader
    on_report: Callable[[MemberRuntime, RankReport], None]
    checkpoint_uploader: CheckpointUploader
    output_sync: OutputSync
    sees_head_files: Callable[[], bool | None]
    cache: str
    preflight_checks: PreflightChecks
    mps: MpsDaemons
    slices: SliceKeeper | None
    clock_offset_s: Callable[[], float]
    hooks: OperatorHooks
    spares: SpareScratch
    data_servers: DataServers
    held_datasets: HeldDatasets
    data_mounts: DataMounts
    folder: str = ""
    accounts: JobAccountPolicy = SINGLE_ACCOUNT

    def node_view(self, member: MemberRuntime) -> NodeContext:
        """This node, for the member's environment variables."""
        scratch = member.scratch
        return NodeContext(
            base={} if member.container is not None else self.base_environment(member),
            devices=self.visible_devices(member),
            cuda_numbers=self.cuda_numbers(member),
            virtual=self.virtual,
            mps=member.mps,
            data=member.data,
            folders=MemberFolders(
                hostfile=scratch.hostfile,
                page=scratch.page,
                reports=scratch.reports,
                checkpoints=member.checkpoints,
                outputs=member.outputs,
                stacks=scratch.path,
                colon_hostfile=scratch.colon_hostfile,
                agent=agent_path(scratch.path) if needs_agent(member.prepare) else "",
            ),
            secrets=member.secrets,
            jax=member.imports_jax,
            ipv6=has_ipv6(),
            root=(os.geteuid() if member.account is None else member.account.uid) == 0,
        )

    def visible_devices(self, member: MemberRuntime) -> tuple[str, ...]:
        """UUIDs of the devices that it may use, or of its MIG slices, by local rank."""
        return member.slices or tuple(self.devices[index].uuid for index in member.grant.devices)

    def cuda_numbers(self, member: MemberRuntime) -> tuple[int, ...]:
        """CUDA's numbers of the devices that it may use, by local rank; none for slices and shares, and where they are not certain.

        A container of podman holds its own GPUs only, so CUDA counts these from 0.
        """
        found = tuple(self.devices[index].cuda_number for index in member.grant.devices)
        certain = tuple(number for number in found if number is not None)
        if len(certain) < len(found) or self.slices is not None or member.mps or not member.all_devices_answer:
            return ()
        if member.container is not None and member.container.runtime.kind is RuntimeKind.PODMAN:
            return tuple(sorted(certain).index(number) for number in certain)
        return certain

    def image_gpus(self, member: MemberRuntime) -> tuple[str, ...]:
        """UUIDs of the devices that its containers get: none if they are virtual."""
        return () if self.virtual else self.visible_devices(member)

    def base_environment(self, member: MemberRuntime) -> Mapping[str, str]:
        """The initial environment of its processes: the supervisor's own, or that of a login of its account."""
        return self.base if member.account is None else login_environment(self.base, member.account)

    def cache_folder(self, member: MemberRuntime) -> str:
        """The cache folder: one per account, since an account that can write there decides what the others run."""
        if member.account is None:
            return self.cache
        folder = os.path.join(self.accounts.folder, "cache", str(member.account.uid))
        make_owned_folder(folder, member.account)
        return folder

    def open_pipe(self, member: MemberRuntime, stream: str) -> int:
        """A new descriptor for a task's output into a stream; the caller closes it."""
        masker = OutputMasker(member.secrets.values()) if member.secrets else None
        return self.spool.open_pipe(stream, None if member.account is None else member.account.uid, masker)

    def stream_key(self, member: MemberRuntime, stream: str) -> str:
        """The spool's key of one of the member's streams; creates the stream on first use."""
        name = StreamName(member.key.job_id, member.key.epoch, stream)
        self.spool.add(name.key, member.scratch.log(stream), rolling=member.prepare.spec.service is not None)
        self.shipper.add(name)
        return name.key

    def open_supervisor_output(self, member: MemberRuntime) -> int:
        """A new descriptor for the member's supervisor stream; the caller closes it."""
        return self.open_pipe(member, self.stream_key(member, f"supervisor-{member.grant.node_rank}"))

    def note(self, member: MemberRuntime, text: str) -> None:
        """Write a line of the supervisor to the job's log."""
        with contextlib.suppress(OSError, KeyError):  # its scratch folder may be gone already
            key = self.stream_key(member, f"supervisor-{member.grant.node_rank}")
            self.spool.write(key, f"phalanx: {replace_invalid_utf8(text)}\n".encode())
