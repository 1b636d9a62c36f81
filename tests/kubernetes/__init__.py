"""A real Kubernetes on this machine: `build.sh` builds its programs once, `real_cluster` runs them, and `kubelet` plays the nodes."""
