#!/usr/bin/env bash
# Build phalanx_VERSION_ARCH.deb: Phalanx with all it imports in /usr/lib/phalanx, beside the system's Python and not in it.
# The files come in /usr/lib/phalanx/package and run from hard links in /usr/lib/phalanx/BUILD, which postinst makes: an upgrade replaces the
# former, and programs of the old release go on with the latter.
#   packaging/deb/build.sh PYTHON WHEEL OUT [VERSION]
# PYTHON: of this checkout's .venv, of the minor version of the target's Debian (3.11 for Debian 12).
set -euo pipefail
python=$1 wheel=$2 out=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
version=${4:-$("$python" -c 'import phalanx; print(phalanx.__version__)')}
minor=$("$python" -c 'import sys; print(sys.version_info.minor)')
architecture=$(dpkg --print-architecture)
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
tree=$stage/tree
venv=$tree/usr/lib/phalanx/package
site=$venv/lib/python3.$minor/site-packages

mkdir -p "$venv/bin" "$site" "$tree/usr/bin" "$tree/DEBIAN" "$tree/etc/phalanx" "$tree/lib/systemd/system" \
  "$tree/usr/share/"{doc/phalanx,man/man1,bash-completion/completions,zsh/vendor-completions,fish/vendor_completions.d}
# A virtual environment needs no more than this, and nothing in it names the machine that built it.
printf 'home = /usr/bin\ninclude-system-site-packages = false\n' >"$venv/pyvenv.cfg"
ln -s "/usr/bin/python3.$minor" "$venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-compile --target "$site" \
  --constraint "$root/constraints.txt" "$wheel[postgres,oidc]"
mv "$site/share" "$venv/share" # `phalanx demo` finds its example there
rm -rf "${site:?}/bin" "$venv/share/man"
digest=$(cd "$venv" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-12)
build=/usr/lib/phalanx/$version-$digest
"$python" -m compileall -q --invalidation-mode unchecked-hash -s "$venv" -p "$build" "$site" || true # a package may ship files of other Pythons
cat >"$venv/bin/phalanx" <<EOF
#!$build/bin/python -P
import sys

from phalanx.app.cli import main

sys.argv[0] = "phalanx"
main()
EOF
chmod 755 "$venv/bin/phalanx"
ln -s "../..$build/bin/phalanx" "$tree/usr/bin/phalanx"
# The Python of the installed release, for units that administrators write: they outlive a release.
printf '#!/bin/sh\nexec %s/bin/python "$@"\n' "$build" >"$tree/usr/lib/phalanx/python"
chmod 755 "$tree/usr/lib/phalanx/python"
echo /usr/lib/phalanx/python >"$venv/lasting-python"

"$python" "$root/docs/man_pages.py" "$stage/man"
for page in "$stage"/man/*.1; do gzip -9n <"$page" >"$tree/usr/share/man/man1/$(basename "$page").gz"; done
command=("$python" -P -m phalanx.app.cli)
"${command[@]}" completion bash >"$tree/usr/share/bash-completion/completions/phalanx"
"${command[@]}" completion zsh >"$tree/usr/share/zsh/vendor-completions/_phalanx"
"${command[@]}" completion fish >"$tree/usr/share/fish/vendor_completions.d/phalanx.fish"
interpreter=$("$python" -c 'import sys; print(sys.executable)')
"${command[@]}" up --systemd --system 2>/dev/null | sed "s#$interpreter#/usr/lib/phalanx/python#" >"$tree/lib/systemd/system/phalanx-head.service"
"${command[@]}" join --systemd --system 2>/dev/null | sed "s#$interpreter#/usr/lib/phalanx/python#" >"$tree/lib/systemd/system/phalanx-node.service"
cp "$here/head.env" "$tree/etc/phalanx/head.env"
cp "$root/LICENSE" "$tree/usr/share/doc/phalanx/copyright"
gzip -9n <"$root/CHANGELOG.md" >"$tree/usr/share/doc/phalanx/changelog.gz"

echo /etc/phalanx/head.env >"$tree/DEBIAN/conffiles"
for script in postinst prerm postrm; do
  sed "s#@BUILD@#$build#" "$here/$script" >"$tree/DEBIAN/$script"
  chmod 755 "$tree/DEBIAN/$script"
done
cat >"$tree/DEBIAN/control" <<EOF
Package: phalanx
Version: $version
Architecture: $architecture
Maintainer: The Phalanx developers <phalanx@localhost>
Installed-Size: $(du -sk --exclude=DEBIAN "$tree" | cut -f1)
Depends: python3 (>= 3.$minor), python3 (<< 3.$((minor + 1))), adduser
Suggests: podman, postgresql, prometheus
Section: admin
Priority: optional
Description: one computer of many GPU servers
 Phalanx schedules, places, launches and recovers training jobs and services
 on a cluster of GPU servers. This package has the command, the head, the
 node and their systemd units. Programs of users bring their own PyTorch.
EOF
find "$tree" -type d -exec chmod 755 {} +
mkdir -p "$out"
dpkg-deb --root-owner-group -Z"${PHALANX_DEB_COMPRESSION:-xz}" --build "$tree" "$out/phalanx_${version}_$architecture.deb"
