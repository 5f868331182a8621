"""The probes of convolutions in steps with fewer steps of fewer layers, for a test."""

from tekso.framework.run import convolution_probes

convolution_probes._WARMUP_STEPS = 1
convolution_probes._REPEATS = 5
convolution_probes.FEW = convolution_probes.FEW._replace(layers=2)
convolution_probes.MANY = convolution_probes.MANY._replace(layers=2)
convolution_probes.STACKS = (convolution_probes.FEW, convolution_probes.MANY)
main = convolution_probes.main
