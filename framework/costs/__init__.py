"""The cost of work: operations, bytes, memory and time of traced graphs and of pieces.

    a graph          `graph_walks`, `op_kinds`: its ops; `graph_work`: their operations and bytes
    its loops        `loop_counts`: iterations; `loop_iterations`: their ops; `loop_lists`: what
                     they save; `loop_overlap`
    its time         `graph_time`; of clusters of XLA: `graph_clusters`; in a cache or in memory:
                     `tensor_reuse`; what an Einsum copies: `einsum_copies`
    its memory       `graph_memory`, `tensor_reads`; ops that do not run: `equal_ops`,
                     `folded_ops`; the order of ops: `op_order`, of threads `executor`
    a step           `step_memory`, on TensorFlow's allocator: `graph_run`, `best_fit`
    this machine     `this_machine`, `memory_limit`; probes: `machine_probes`, `kernel_probes`,
                     `probe_runs`; their
                     results: `stored_speeds`; whether it is idle: `reference_work`
    other devices    `device_types`, `tpu_time`
    pieces           `piece_traces`, `piece_gradients`, `piece_costs`

Of the executions, these modules import only the errors.
"""
