"""The probes of real steps with fewer steps, for a test."""

from tekso.framework.run import step_probes

step_probes._WARMUP_STEPS = 1
step_probes._REPEATS = 5
main = step_probes.main
