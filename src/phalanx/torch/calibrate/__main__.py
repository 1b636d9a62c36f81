"""Run `python -m phalanx.torch.calibrate [--quick]`."""

from phalanx.torch.calibrate.main_program import main

main()
