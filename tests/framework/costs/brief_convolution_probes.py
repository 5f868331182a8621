"""The probes of convolutions in steps with fewer steps, for a test."""

from tekso.framework.run import convolution_probes

convolution_probes._WARMUP_STEPS = 1
convolution_probes._REPEATS = 5
main = convolution_probes.main
