"""A mail server on loopback that keeps what it receives: enough of SMTP (RFC 5321) for the client of the standard library."""

# mypy: disable-error-code="var-annotated"

import email
import email.policy
import socketserver
import threading


class MailServer:
    """Use as a context. `mails`: (recipients, message) of each that was accepted; while `refuses`, recipients are refused."""

    def __init__(self):
        self.mails, self.refuses = [], False
        server = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                self.say("220 here")
                to = []
                while line := self.rfile.readline().decode().strip():
                    word = line.upper()
                    if word.startswith("RCPT"):
                        to.append(line.partition("<")[2].partition(">")[0])
                        self.say("550 no such person" if server.refuses else "250 ok")
                    elif word == "DATA":
                        self.say("354 go on")
                        server.mails.append((to, self.message()))
                        self.say("250 ok")
                    elif word == "QUIT":
                        self.say("221 bye")
                        return
                    else:
                        self.say("250 ok")

            def message(self):
                lines = []
                while (line := self.rfile.readline()) != b".\r\n":
                    lines.append(line.removeprefix(b".") if line.startswith(b"..") else line)
                return email.message_from_bytes(b"".join(lines), policy=email.policy.default)

            def say(self, line):
                self.wfile.write(f"{line}\r\n".encode())

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self):
        return f"mailto://127.0.0.1:{self.server.server_address[1]}?from=phalanx@example.org&mode=insecure"

    def texts(self, address):
        """Subjects and bodies of the mails to one address."""
        return [
            (mail["subject"], mail.get_content().replace("\r\n", "\n")) for to, mail in self.mails if to == [address]
        ]
