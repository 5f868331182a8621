"""Several tasks that are trained together, with shared and own parts; and distillation."""
