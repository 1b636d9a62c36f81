"""`hydra/launcher=phalanx`: each job of a Hydra sweep is a job of the cluster. It needs hydra-submitit-launcher; without it, Hydra sees nothing here."""

from importlib.util import find_spec

if find_spec("hydra_plugins.hydra_submitit_launcher") is not None:
    from hydra_plugins.phalanx_launcher._launcher import PhalanxLauncher as PhalanxLauncher
