"""The probes of the starts on a mesh with fewer steps, for a test."""

from tekso.framework.planning import mesh_probes

mesh_probes._WARMUP_STEPS = 10
mesh_probes._STEP_REPEATS = 15
mesh_probes._REPEATS = 3
main = mesh_probes.main
