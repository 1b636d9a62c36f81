"""The start script of a machine: it joins the head with a token for its one node, and switches itself off if that fails.

The image needs Python. If it has no Phalanx, the head brings it: the script downloads the program over TLS, after a check of the fingerprint of the
head's certificate.
"""

from __future__ import annotations

import shlex
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.ports.engine import MachineJoin
from phalanx.providers.clouds.pool_settings import MachineSettings

_FETCH: Final = """\
import hashlib, http.client, os, ssl, sys, tarfile, time
address, wanted, folder = sys.argv[1:]
def get(path, context, **headers):
    link = http.client.HTTPSConnection(address, timeout=60, context=context)
    link.request("GET", path, headers=headers)
    reply = link.getresponse()
    if reply.status != 200:
        raise OSError("%s: status %d: %s" % (path, reply.status, reply.read(300).decode()))
    return reply
def fetch():
    ca = get("/v1/ca", ssl._create_unverified_context()).read(65536).decode()
    if "sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(ca)).hexdigest() != wanted:
        sys.exit("phalanx: the head at %s has a certificate with another fingerprint" % address)
    own = {"Authorization": "Bearer " + os.environ["PHALANX_JOIN_TOKEN"]}
    with tarfile.open(fileobj=get("/v1/join/files", ssl.create_default_context(cadata=ca), **own), mode="r|gz") as tar:
        tar.extractall(folder)
for attempt in range(60):
    try:
        sys.exit(fetch())
    except (OSError, http.client.HTTPException, tarfile.TarError) as error:
        print("phalanx: no program from the head yet: %s" % error, flush=True)
        time.sleep(10)
sys.exit("phalanx: the head gives no program")
"""


SHUT_DOWN: Final = "shutdown -h now"


def start_script(
    node_id: NodeId, join: MachineJoin, machine: MachineSettings, *, notices: str, power_off: str = ""
) -> str:
    """Return the script. The same order gives the same text, as an idempotency token demands.

    A machine that is switched off is charged for its disks at most, until the head deletes it; EC2 deletes it at once.

    Args:
        node_id: of the machine.
        join: how it joins the head.
        machine: settings of its pool.
        notices: the cloud whose notices the machine reads, as in `node.probes.spot_notices`; empty for none.
        power_off: a command by which it ends itself; empty for `shutdown`.
    """
    # Without quotes, an empty line of `setup` would be a syntax error.
    before = f"({machine.setup})" if machine.setup else ":"
    ending = f" PHALANX_POWER_OFF={shlex.quote(power_off)}" if power_off else ""
    words = [
        *("--head", join.address, "--fingerprint", join.fingerprint, "--name", node_id),
        *("--silence", f"{machine.silence_s:g}"),
        *(("--notices", notices) if notices else ()),
        *(("--virtual", str(machine.virtual)) if machine.virtual else ()),
    ]
    return f"""#!/bin/sh
# Node {node_id} of Phalanx. The machine ends itself when its head has no use for it, or is silent for {machine.silence_s:g} s.
export HOME="${{HOME:-/root}}" PHALANX_JOIN_TOKEN={shlex.quote(join.token)}{ending}
files="$HOME/.phalanx-files"
run() {{ if [ -e "$files/start.py" ]; then python3 "$files/start.py" "$@"; else python3 -m "$@"; fi; }}
fetch() {{ python3 - {shlex.join([join.address, join.fingerprint])} "$files" <<'END'
{_FETCH}END
}}
{before} && {{ python3 -c 'import phalanx' 2>/dev/null || fetch; }} && run phalanx.app.rented_machine {shlex.join(words)}
exec {power_off or SHUT_DOWN}
"""
