#!/usr/bin/env bash
# Build the image phalanx:VERSION with podman from a Debian package of `make deb`.
#   packaging/image/build.sh PACKAGE TAG [SUITE]
# SUITE: of Debian, bookworm. BASE: an image to put Phalanx into, instead of a Debian tree. PHALANX_PODMAN: the command with its options.
set -euo pipefail
package=$1 tag=$2 suite=${3:-bookworm}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
read -ra podman <<<"${PHALANX_PODMAN:-podman}"
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
if [ -n "${BASE:-}" ]; then
  dpkg-deb --extract "$package" "$stage/tree"
  cp "$here/settle.py" "$stage/tree/usr/lib/phalanx/settle.py"
  tar --create --file "$stage/tree.tar" --directory "$stage/tree" --owner=0 --group=0 ./usr/lib/phalanx ./usr/bin/phalanx
  "${podman[@]}" build --quiet --build-arg "BASE=$BASE" --file "$here/Containerfile.base" --tag "$tag" "$stage"
  exit
fi
cp "$package" "$stage/phalanx.deb"
echo "Making a Debian tree of $suite."
mmdebstrap --quiet --variant=minbase --include=python3,adduser,ca-certificates,iproute2,procps \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
  --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  --customize-hook="copy-in $stage/phalanx.deb $here/settle.py /tmp" \
  --customize-hook='chroot "$1" dpkg --install /tmp/phalanx.deb' \
  --customize-hook='chroot "$1" python3 /tmp/settle.py' \
  --customize-hook='chroot "$1" install -d -o phalanx -g phalanx /srv/phalanx' \
  --customize-hook='rm -rf "$1"/tmp/phalanx.deb "$1"/tmp/settle.py "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*' \
  "$suite" "$stage/tree.tar"
"${podman[@]}" build --quiet --file "$here/Containerfile" --tag "$tag" "$stage"
