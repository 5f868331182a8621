"""Which fields are shown if runs have Params of different classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from compared_runs import write

from tekso.tools import compare

OPTIMIZER = """\
learner.optimizer : Params("tekso.framework.optimizers.adam:AdamW")
learner.optimizer.beta1 : 0.9
learner.optimizer.beta2 : 0.98  # params/lm/some.py:9
"""
OTHER = """\
learner.optimizer : Params("tekso.framework.optimizers.sgd:Sgd")
learner.optimizer.momentum : 0.9
"""
CASES = {
    "another class": (
        OPTIMIZER,
        OTHER,
        [
            'learner.optimizer : Params("tekso.framework.optimizers.adam:AdamW") | '
            'Params("tekso.framework.optimizers.sgd:Sgd")',
            "learner.optimizer.beta2 : 0.98 [params/lm/some.py:9] | (Sgd has no such field)",
        ],
    ),
    "an older version of the class": (
        OPTIMIZER,
        OPTIMIZER.replace("learner.optimizer.beta1 : 0.9\n", ""),
        ["learner.optimizer.beta1 : 0.9 | (AdamW has no such field)"],
    ),
    "no Params": (
        'execution.updates : Params("a.b:Hybrid")\nexecution.updates.groups : 2  # --set\n',
        "execution.updates : None\n",
        [
            'execution.updates : Params("a.b:Hybrid") | None',
            "execution.updates.groups : 2 [--set] | (execution.updates is None)",
        ],
    ),
    "fewer layers": (
        'layers : [Params("a.b:Wide"), Params("a.b:Wide")]\nlayers[1].dim : 3\n',
        'layers : [Params("a.b:Wide")]\n',
        ['layers : [Params("a.b:Wide"), Params("a.b:Wide")] | [Params("a.b:Wide")]'],
    ),
    "a long value above": (
        'layers : [Params("a.b:Wide"), Params("a.b:Wide")]\nlayers[1].dim : 3  # --set\n',
        'layers : [Params("a.b:Wide")]\n',
        [
            'layers : [Params("a.b:Wide"), Params("a.b:Wide")] | [Params("a.b:Wide")]',
            'layers[1].dim : 3 [--set] | (layers is [Params("a.b:Wide")])',
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_field_that_a_run_does_not_have_is_left_out_or_explained(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, lines = CASES[case]
    paths = [write(tmp_path / name, loss=1.0) for name in "ab"]
    for path, text in zip(paths, (one, other), strict=True):
        with Path(path, "params.txt").open("a") as file:
            file.write(text)
    output = tmp_path / "c.html"
    compare.compare(paths, output=str(output))
    shown = capsys.readouterr().out.partition("Params that differ\n\n")[2]
    assert shown.splitlines()[: shown.splitlines().index("")] == lines
    for line in lines:
        field, _, values = line.partition(" : ")
        assert f"<td>{field}</td>" in output.read_text()
        if values.endswith(" has no such field)"):
            assert f"<small>{values.rpartition('(')[2][:-1]}</small>" in output.read_text()


def test_a_value_of_many_runs_is_printed_once_with_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [
        write(tmp_path / f"{name}{seed}", loss=1.0, seed=seed, rate=rate)
        for name, rate, seeds in (("a", 0.1, 4), ("b", 0.3, 1))
        for seed in range(seeds)
    ]
    output = str(tmp_path / "c.html")
    compare.compare(paths, output=output)
    shown = capsys.readouterr().out.partition("Params that differ\n\n")[2].splitlines()
    assert shown[0] == (
        "learner.schedule.initial_value : "
        f"0.1 [--set] ({paths[0]}, {paths[1]} and 2 more) | 0.3 [--set] ({paths[4]})"
    )
    assert shown[1].startswith(f"run.seed : 0 [--seed] ({paths[0]}, {paths[4]}) | 1 [--seed] (")
    compare.compare(paths[:4], output=output)
    few = capsys.readouterr().out.partition("Params that differ\n\n")[2].splitlines()
    assert few[0] == "run.seed : 0 [--seed] | 1 [--seed] | 2 [--seed] | 3 [--seed]"
