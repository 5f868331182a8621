"""The probes of the speed of a machine with shorter measurements, for a test."""

from tekso.framework.costs import machine_probes

machine_probes._RUN_S = 0.002
machine_probes._REPEATS = machine_probes._MOST_REPEATS = 1
main = machine_probes.main
