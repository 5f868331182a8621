"""The probes of the speed of a machine with shorter measurements of less work, for a test."""

from tekso.framework.costs import function_probes, machine_probes, probe_runs

probe_runs._RUN_S = 0.002
probe_runs._REPEATS = probe_runs._PASSES = 1
probe_runs._MANY_TIMES = 32
probe_runs._PAUSE_OPS = 4
machine_probes._LARGER_ARRAYS = (1 << 15, 1 << 16)
machine_probes._LARGE = 1 << 19
machine_probes._PRODUCTS = ((8, 256, 256), (32, 256, 256), (64, 128, 128), (256, 128, 256))
machine_probes._PRODUCTS += ((256, 256, 256),)
machine_probes._BATCH_PRODUCTS = machine_probes._BATCH_PRODUCTS[:1]
machine_probes._CONVOLUTIONS = machine_probes._CONVOLUTIONS[:2]
machine_probes._DEPTHWISE = machine_probes._DEPTHWISE[:1]
machine_probes._LARGER = machine_probes._LARGER[:1]
machine_probes._ROWS = machine_probes._ROWS[::2]
function_probes._SHAPE, function_probes._TIMES = (32, 32), 2
function_probes._CLUSTERED = {"Sin": function_probes._CLUSTERED["Sin"]}
main = machine_probes.main
