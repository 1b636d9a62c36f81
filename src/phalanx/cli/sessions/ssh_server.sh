# Runs one `sshd -i` beside a job's ranks, as the job's user: no port, one connection, one key. $1: the client's public key.
# Prints one line first: the user and the host key of this attempt. Everything it writes is in a folder that only this user can open.
umask 077
fail() { echo "phalanx-ssh-error $1"; exit 127; }
PATH="$PATH:/usr/sbin:/sbin:/usr/local/sbin"
server=$(command -v sshd) || fail "there is no sshd here: install the package openssh-server on the node, or in the job's image"
keygen=$(command -v ssh-keygen) || fail "there is no ssh-keygen here: install the package openssh-client"
private=$(dirname "${PHALANX_LEASE_PAGE:-/nonexistent/page}")
if [ -w "$private" ]; then session=$(mktemp -d "$private/ssh-XXXXXX") || fail "no folder can be written in $private"
else # a key of this session alone
  session=$(mktemp -d) || fail "no folder can be written here"
  private=$session
fi
clean() { trap '' HUP INT TERM; rm -rf "$session"; } # the hangup at the end of a session must not end rm
trap clean EXIT
trap 'clean; exit 129' HUP INT TERM PIPE # after sshd, which receives them too; they may arrive while the other trap runs
key="$private/ssh_host_key"
if [ ! -e "$key.pub" ]; then # several sessions may begin at once: the first link wins
  "$keygen" -q -t ed25519 -N "" -C "" -f "$session/key" || fail "ssh-keygen failed"
  ln "$session/key" "$key" 2>/dev/null && ln "$session/key.pub" "$key.pub"
  tries=0
  while [ ! -e "$key.pub" ] && [ $tries -lt 100 ]; do tries=$((tries + 1)); sleep 0.05; done
fi
for sftp in /usr/lib/openssh/sftp-server /usr/libexec/openssh/sftp-server /usr/lib/ssh/sftp-server /usr/libexec/sftp-server; do
  [ -x "$sftp" ] && break
done
until=$(date -d "@$(($(date +%s) + 300))" +%Y%m%d%H%M%S) || fail "date fails"
echo "expiry-time=\"$until\" $1" >"$session/authorized"
export PHALANX_SSH_PWD="$PWD"
export -p >"$session/environment"
cat >"$session/enter" <<'END'
term=$TERM
. "$1"
[ -z "$term" ] || export TERM="$term"
cd "$PHALANX_SSH_PWD"
unset PHALANX_SSH_PWD
shell=${SHELL:-/bin/sh}
[ -x "$shell" ] || shell=/bin/sh
[ -n "$SSH_ORIGINAL_COMMAND" ] || exec "$shell" -i
exec "$shell" -c "$SSH_ORIGINAL_COMMAND"
END
cat >"$session/config" <<END
HostKey $key
AuthorizedKeysFile $session/authorized
AuthenticationMethods publickey
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PidFile none
PrintMotd no
PrintLastLog no
X11Forwarding no
ForceCommand /bin/sh $session/enter $session/environment
Subsystem sftp $sftp
END
[ "$(id -u)" != 0 ] || mkdir -p /run/sshd 2>/dev/null # sshd that root starts wants it
"$server" -t -f "$session/config" 2>"$session/log" || fail "sshd refuses its settings: $(head -c 500 "$session/log" | tr '\n' ' ')"
echo "phalanx-ssh $(id -un) $(cut -d ' ' -f 1,2 "$key.pub")"
"$server" -i -f "$session/config" -E "$session/log"
