"""The connections of a gang's first node to the others: it tells them what to run, and they report output and exit codes.

Both sides prove that they hold the gang's key. Programs on any node connect as clients: a launch agent of `mpirun`, or an `srun`.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from phalanx.node.gang.job_link import JobLink, LinkClosed, accept_link, open_link
from phalanx.node.gang.step_tasks import StepTasks

JOIN_S: Final = 60.0  # all nodes pass the barrier together; a node that is later than this is lost, and the gang ends
Message = dict[str, Any]


class GangHost:
    """Node rank 0.

    Args:
        address: of this node, as the others use it.
        port: to listen on.
        key: of the gang.
        others: how many other nodes the gang has.
        on_message: receives what a node reports; called from a thread for each node.
        on_client: serves a client until its connection ends; called in a thread of its own. LinkClosed ends it.
        on_lost: receives the node rank of a connection that ended.
    """

    def __init__(
        self,
        address: str,
        port: int,
        key: str,
        others: int,
        *,
        on_message: Callable[[Message], None],
        on_client: Callable[[JobLink], None],
        on_lost: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._address, self._port, self._key, self._others = address, port, key, others
        self._on_message, self._on_client, self._on_lost = on_message, on_client, on_lost
        self._joined = threading.Condition()
        self._nodes: dict[int, JobLink] = {}

    def open(self) -> None:
        """Accept connections.

        Raises:
            OSError: the port cannot be bound.
        """
        listener = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._address, self._port))
        except OSError:  # the address that others use may not be one of this host
            listener.bind(("", self._port))
        listener.listen(1024)
        threading.Thread(target=self._accept, args=(listener,), name="gang-accept", daemon=True).start()

    def gather(self, names: Sequence[str]) -> str:
        """Accept connections and wait for all other nodes. Return why not all are there, with the node's name from `names`; "" if they are."""
        try:
            self.open()
        except OSError as error:
            return f"cannot listen on port {self._port}: {error.strerror}"
        missing = self.await_nodes(JOIN_S)
        return f"node {names[missing[0]]} did not connect within {JOIN_S:g} s" if missing else ""

    def await_nodes(self, within_s: float) -> list[int]:
        """Wait for all other nodes; return the node ranks of those that did not come."""
        others = range(1, self._others + 1)
        with self._joined:
            self._joined.wait_for(lambda: len(self._nodes) >= self._others, timeout=within_s)
            return [rank for rank in others if rank not in self._nodes]

    def send(self, rank: int, message: Message) -> None:
        """Send to one node.

        Raises:
            LinkClosed: it is gone.
        """
        with self._joined:
            link = self._nodes.get(rank)
        if link is None:
            raise LinkClosed("it is gone")
        link.send(message)

    def send_all(self, message: Message) -> None:
        """Send to each node that is there."""
        with self._joined:
            links = list(self._nodes.values())
        for link in links:
            with contextlib.suppress(LinkClosed):
                link.send(message)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=self._greet, args=(sock,), name="gang-peer", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            link, who = accept_link(sock, self._key)
            if "node" in who:
                self._serve_node(link, int(who["node"]))
            else:
                self._on_client(link)
        except LinkClosed:
            sock.close()

    def _serve_node(self, link: JobLink, rank: int) -> None:
        with self._joined:
            self._nodes[rank] = link
            self._joined.notify_all()
        try:
            while True:
                self._on_message(link.receive())
        except LinkClosed:
            with self._joined:
                self._nodes.pop(rank, None)
            self._on_lost(rank)
            raise


def serve_gang_node(
    address: str,
    port: int,
    key: str,
    rank: int,
    *,
    handle: Callable[[StepTasks, Message], None],
    name: str,
    pid_variable: str = "",
) -> int:
    """Another node: run what the host asks for until it says that the job has ended. Returns the exit code of this node's part.

    Args:
        address: of the host.
        port: of the host.
        key: of the gang.
        rank: this node's.
        handle: carries out a message with this node's tasks.
        name: of the program for which tasks run, for messages.
        pid_variable: see `StepTasks`.

    Raises:
        LinkClosed: the host cannot be reached.
    """
    link = open_link(address, port, key, {"node": rank}, within_s=JOIN_S)

    def send(message: Message) -> None:
        with contextlib.suppress(LinkClosed):
            link.send(message)

    tasks = StepTasks(send, name=name, pid_variable=pid_variable)
    while True:
        try:
            message = link.receive()
        except LinkClosed:
            tasks.signal(signal.SIGKILL)
            return 1
        if "bye" in message:
            tasks.signal(signal.SIGKILL)
            return 0
        handle(tasks, message)
