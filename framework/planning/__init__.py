"""Planning: what an execution would need, exchange and take, worked out before a step is run."""
