"""Benchmarks against other frameworks; not part of the installed package.

    make benchmarks
    make benchmarks ARGS='--only=transformer_small,tekso,pytorch --turns=5'

run.py is the command. Every measurement is a process of its own (worker.py), which trains one
workload (workloads.py) in one framework (frameworks/). Other frameworks are installed in their own
virtual environments (environments.py).
"""
