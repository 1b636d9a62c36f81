#!/usr/bin/env bash
# Builds a real Kubernetes 1.20.2 from Debian's source package into a cache folder: etcd, the API server, the scheduler, the controller
# manager and kubectl. Takes some ten minutes of CPU, once. Root on Debian bookworm only; see docs/testing.md.
#
#   tests/kubernetes/build.sh FOLDER
set -euo pipefail

folder=$(mkdir -p "$1" && cd "$1" && pwd)
package=github.com/modern-go/reflect2
export DEBIAN_FRONTEND=noninteractive

exec 9>"$folder/lock"
flock 9
if [ -e "$folder/ready" ]; then exit 0; fi

say() { echo "kubernetes-tools: $*"; }

if ! command -v go >/dev/null || ! command -v dpkg-source >/dev/null; then
  say "installing golang-go and dpkg-dev"
  apt-get -qq -o DPkg::Lock::Timeout=600 update
  apt-get -qq -o DPkg::Lock::Timeout=600 install -y --no-install-recommends golang-go dpkg-dev >/dev/null
fi

# Lists of their own: the machine's sources stay as they are.
say "fetching the sources of Kubernetes and the programs etcd and kubectl"
mkdir -p "$folder/apt/lists/partial" "$folder/apt/parts" "$folder/packages"
chmod 755 "$folder" "$folder/apt" "$folder/apt/lists"
for list in /etc/apt/sources.list.d/debian.sources; do
  [ -e "$list" ] && sed 's/^Types:.*/Types: deb deb-src/' "$list" >"$folder/apt/parts/$(basename "$list")"
done
if [ -s /etc/apt/sources.list ]; then
  sed -nE 's/^deb(-src)?([[:space:]].*debian.*)/deb\2\ndeb-src\2/p' /etc/apt/sources.list | sort -u >"$folder/apt/parts/debian.list"
fi
apt=(apt-get -qq -o "Dir::Etc::SourceList=/dev/null" -o "Dir::Etc::SourceParts=$folder/apt/parts" -o "Dir::State::Lists=$folder/apt/lists"
  -o "APT::Sandbox::User=root" -o "Debug::NoLocking=1")
"${apt[@]}" update
cd "$folder/packages"
rm -rf source
"${apt[@]}" source --download-only kubernetes >/dev/null
"${apt[@]}" download etcd-server kubernetes-client golang-github-modern-go-reflect2-dev
dpkg-source -q --no-check -x kubernetes_*.dsc source >/dev/null
for one in etcd-server kubernetes-client golang-github-modern-go-reflect2-dev; do
  rm -rf "$one" && dpkg -x "$one"_*.deb "$one"
done

# Go 1.19 builds this tree only from a GOPATH, and the reflect2 in it kills a program built by Go 1.18 or newer.
say "building: some ten minutes on one core"
rm -rf "$folder/go" && mkdir -p "$folder/go/src/k8s.io" "$folder/bin"
mv source "$folder/go/src/k8s.io/kubernetes"
tree="$folder/go/src/k8s.io/kubernetes"
rm -rf "$tree/vendor/$package"
cp -r "golang-github-modern-go-reflect2-dev/usr/share/gocode/src/$package" "$tree/vendor/$package"
export GOPATH="$folder/go" GO111MODULE=off CGO_ENABLED=0 GOCACHE="$folder/go/cache" GOFLAGS="-p=2"
cd "$tree"
go build -o "$folder/go/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
marked=$(grep -rlE '\+k8s:openapi-gen=' --include='*.go' pkg staging/src/k8s.io \
  | grep -vE '_test\.go|/testdata/|/code-generator/|/sample-|zz_generated' | xargs -n1 dirname | sort -u \
  | sed 's#^staging/src/#vendor/#; s#^#k8s.io/kubernetes/#' | paste -sd,)
"$folder/go/openapi-gen" --logtostderr -i "$marked" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$folder/go/violations" 2>/dev/null
version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
flags="-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20"
for program in kube-apiserver kube-scheduler kube-controller-manager; do
  say "building $program"
  go build -ldflags "$flags" -o "$folder/bin/$program" "./cmd/$program"
done
cp "$folder/packages/etcd-server/usr/bin/etcd" "$folder/packages/kubernetes-client/usr/bin/kubectl" "$folder/bin/"
rm -rf "$folder/go" "$folder/packages" "$folder/apt"
touch "$folder/ready"
