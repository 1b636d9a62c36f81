"""A real Kubernetes on this machine (`build.sh` builds its programs once, `real_cluster` runs them, `kubelet` plays the nodes), and a fake one.

The fake is `fake_api` over `fake_store`, with `fake_nodes` for what runs. `clusters` offers both to one suite.
"""
