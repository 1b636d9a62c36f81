"""Run `python -m phalanx.torch.calibrate [--quick]`."""

from phalanx.torch.calibrate.program import main

main()
