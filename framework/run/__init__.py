"""A run: from the Params of an experiment to a trained model, and what it leaves in its logdir.

    modes ─► logdir, checkpoints ─► assembly ─► training_loop ─► evaluation, report

The commands in `tools/` start here; nothing else in `framework/` imports it.
"""
