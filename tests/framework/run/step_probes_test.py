"""What starts in a step is found from steps that have more or less of it."""

from __future__ import annotations

import functools

import pytest

from tekso.framework.cores import num_cores
from tekso.framework.costs.this_machine import OF_STEP, STARTS
from tekso.framework.planning import start_probes
from tekso.framework.run import step_probes
from tekso.framework.run.step_probes import EQUATIONS, SMALL, StepProbe

PLANTED = {name: 1e-6 * (i + 2) for i, name in enumerate((*OF_STEP, *STARTS))}


@functools.cache
def counts(probe: StepProbe) -> dict[str, int]:
    return step_probes.counts_of(step_probes.graphs_of(probe))


def seconds(probe: StepProbe) -> float:
    return sum(PLANTED[name] * number for name, number in counts(probe).items())


def test_planted_times_are_found_from_the_counts_of_real_steps() -> None:
    probes = {probe for _, *both in EQUATIONS for probe in both}
    measured = {probe: (seconds(probe), counts(probe)) for probe in probes}
    found = start_probes.solve(measured, EQUATIONS, SMALL)
    assert found == pytest.approx(PLANTED, rel=1e-6)


def test_a_step_has_as_many_arrays_variables_clusters_and_arguments_as_its_model() -> None:
    def more(probe: StepProbe, than: StepProbe) -> dict[str, int]:
        return {name: counts(probe)[name] - counts(than)[name] for name in PLANTED}

    towers = num_cores() if 64 % num_cores() == 0 else 1
    assert counts(SMALL)["call_s"] == 1 and counts(SMALL)["cluster_s"] == 0
    assert more(step_probes.ARRAYS, SMALL)["array_s"] == 8
    assert more(step_probes.WIDE, SMALL)["variable_s"] == 16 * 3  # a weight and its two slots
    deep = more(step_probes.DEEP, SMALL)
    assert {name for name, number in deep.items() if number} == {"op_s"}
    assert deep["op_s"] == 2 * 150 * towers  # each tanh and its gradient
    assert more(step_probes.PRODUCTS, step_probes.APART)["product_s"] == 2 * 8 * towers
    apart = more(step_probes.APART, SMALL)
    assert {name for name, number in apart.items() if number} == {"op_s"}
    convolutions = more(step_probes.CONVOLUTIONS, step_probes.APART)
    assert convolutions["convolution_s"] == 3 * 8 * towers
    clusters = more(step_probes.CLUSTERS, step_probes.APART)
    assert clusters["cluster_s"] >= 8 * towers  # and those of the update
    larger = more(step_probes.ARGUMENTS, step_probes.CLUSTERS)
    assert (larger["cluster_s"], larger["argument_s"]) == (0, 8 * (7 + 3 - 2) * towers)


def test_a_disturbed_step_makes_no_time_negative() -> None:
    one, two, three = (dict.fromkeys(PLANTED, number) for number in (1.0, 2.0, 3.0))
    measured = {equation.more: (1.0, two) for equation in EQUATIONS}
    measured |= {SMALL: (3.0, one), step_probes.APART: (3.0, one)}
    measured[step_probes.ARGUMENTS] = (1.0, three)
    assert min(start_probes.solve(measured, EQUATIONS, SMALL).values()) == 0.0
