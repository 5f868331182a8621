"""Runs an experiment: from its Params to a trained model and the files in its logdir.

    modes ─► logdir, checkpoints ─► assembly ─► training_loop ─► evaluation, report

The commands in `tools/` start here; nothing else in `framework/` imports it.
"""
