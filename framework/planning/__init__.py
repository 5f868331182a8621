"""The memory, communication and time of an execution, computed before a step runs.

    layouts of a mesh   `tracing` records a step (`tracing_context`, `work_recorder`, `dim_names`)
                        as `step_work`; `cost_model` computes its cost (`placed_work`, `rings`);
                        `layout_search` ranks layouts, and `layout_ranking` explains them
    a given mesh        `sharding`, `layout_drawing`; its program: `compiled_step`,
                        `partitioned_program`, `collectives`
    several devices     `mesh_graphs`, `mesh_time`, `step_time`; probes: `mesh_probes`,
                        `start_probes`
    a pipeline          `stage_figures`: each stage (`saved_bytes`, `pass_times`, `stage_memory`);
                        `simulator`: the schedule; on this machine: `pipeline_time`,
                        `pipeline_probes`, `pipeline_memory`, `simulated_calls`
    stages on meshes    `stage_work`, `mesh_stages`, `mesh_figures`; on this machine:
                        `mesh_stage_graphs`
    a measured step     `measured_step`, `timeline_drawing`

Only the probes run steps.
"""
