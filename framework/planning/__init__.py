"""Planning: memory, communication and time of an execution, computed before a step runs."""
