"""A wire to PostgreSQL that can be cut at any moment, or swallow what one side says while the other hears all."""

import contextlib
import select
import socket
import threading
from urllib.parse import urlsplit


class Wire:
    """Forwards connections of loopback. A cut lasts until `mend`.

    Attributes:
        deaf: what the server answers reaches nobody, and the first answer that is lost cuts the wire for good.
        mute: what clients say is kept back until `say`; the clients' side of the connection may be cut meanwhile.
    """

    def __init__(self, dsn):
        self.target = urlsplit(dsn)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.dsn = dsn.replace(f":{self.target.port}/", f":{self.listener.getsockname()[1]}/")
        self.deaf = self.mute = self.refusing = False
        self.pairs = []
        self.kept = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        """Every connection breaks, on both sides."""
        for pair in self.pairs:
            for end in pair:
                _shut(end)

    def cut_clients(self):
        """The clients' side breaks; the server believes them there."""
        for client, _ in self.pairs:
            _shut(client)

    def say(self):
        """What was kept back reaches the server now."""
        self.mute = False
        for server, data in self.kept:
            with contextlib.suppress(OSError):
                server.sendall(data)

    def close(self):
        self.listener.close()
        self.cut()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            if self.refusing:
                _shut(client)
                continue
            server = socket.create_connection((self.target.hostname, self.target.port))
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.pairs.append((client, server))
            threading.Thread(target=self._carry, args=(client, server), daemon=True).start()

    def _carry(self, client, server):
        ends = {client, server}
        with contextlib.suppress(OSError, ValueError):
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    data = end.recv(65536)
                    if end is client and not data and self.mute:
                        ends.discard(client)  # the client is gone, and the server does not know
                        continue
                    if not data:
                        raise OSError
                    if end is client and self.mute:
                        self.kept.append((server, data))
                    elif end is server and self.deaf:
                        self.deaf = False
                        raise OSError
                    else:
                        (server if end is client else client).sendall(data)
        _shut(client)
        _shut(server)


def _shut(end):
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
