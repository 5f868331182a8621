"""A run tries `decode` before its first step, without computing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from small_tasks import Flowers

from tekso.framework import error_advice
from tekso.framework.execution import DataParallel
from tekso.framework.experiment import Run, Tree
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.out_of_memory import OutOfMemoryError
from tekso.framework.params import param
from tekso.framework.run import modes
from tekso.framework.run.decoding_trial import DecodingError
from tekso.framework.run.job import Job
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.report.console import PlainConsole
from tekso.framework.schedules import Constant
from tekso.framework.task import Decoded, TaskError
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification

TRACES: list[Any] = []
VALUES: list[Any] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    TRACES.clear()
    VALUES.clear()


class Decoding(Classification):
    """Decodes the first batch, with a mistake."""

    class Params(Classification.Params):
        """Params of Decoding."""

        mistake: str = param("What is wrong.", default="")

    def decode(self, program: Any, input: Any) -> Any:
        """See Task."""
        mistake, batch = self.params.mistake, input.batch(0)
        if mistake == "before":
            batch["y"]
        if mistake == "early":
            return None
        if mistake == "large":
            raise MemoryError("Unable to allocate 5 GiB")
        found = program.call(self.classes, batch["x"])
        VALUES.append(np.asarray(found["classes"]))
        while mistake == "endless" and not found["classes"].numpy().any():
            found = program.call(self.classes, batch["x"])
        if mistake == "after":
            found["scores"]
        if mistake == "indexed":
            found["classes"]["y"]
        if mistake == "type":
            return str(found)
        if mistake == "zeros":
            [1 // value for value in VALUES[-1].tolist()]
        return Decoded("decoded", [{"classes": found["classes"].numpy().tolist()}])

    def classes(self, theta: Any, x: Any, ctx: Any) -> Any:
        """Returns classes above 0."""
        TRACES.append(x.shape)
        if self.params.mistake == "traced":
            x = x @ tf.ones([3, 2])
        if self.params.mistake == "if" and tf.reduce_sum(x) > 0:
            x = -x
        for i in range(2):
            one = ctx.fold(i) if self.params.mistake == "folded" else ctx
            if self.params.mistake in ("repeated", "folded"):
                x += 0.0 * one.normal(self, x.shape, name="fresh")
        logits = self.model.fprop(theta.model, x, ctx)
        return {"classes": 1 + tf.argmax(logits, 1), "more": tf.where(logits > 0), "none": None}


def job_of(mistake: str, folder: Path, output: io.StringIO, **run: Any) -> Job:
    model = Mlp.Params(input_dim=4, hidden_dims=[6], output_dim=3)
    tree = Tree.Params(
        task=Decoding.Params(model=model, num_classes=3, mistake=mistake),
        learner=Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.1)),
        input=Flowers.Params(batch_size=4),
        execution=DataParallel.Params(towers=1, xla="none"),
        run=Run.Params(steps=2, **run),
    )
    return Job(
        model="a.B", tree=tree, registered=tree.copy(), logdir=Logdir(str(folder)),
        console=PlainConsole(output),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("before", r"Decoding.decode \(.*\) fails with KeyError: 'y'; the batch has 'x', 'labels'"),
        (
            "if",
            r"fails with OperatorNotAllowed\w+: .* not allowed; the code runs once, .*range\. The",
        ),
        ("traced", r"Decoding.decode \(.*\) fails with \w+: .*[34].*run.decode_at_end=False"),
    ],
)
def test_an_error_before_the_first_result_ends_the_run_before_the_first_step(
    mistake: str, said: str, tmp_path: Path
) -> None:
    output = io.StringIO()
    with pytest.raises(DecodingError, match=said) as caught:
        modes.train(job_of(mistake, tmp_path, output))
    end = "To train without it, --set run.decode_at_end=False (it is True by default)"
    assert str(caught.value).endswith(
        f". The run calls it after its last step, and tries it before the first one. {end}"
    )
    assert ".. " not in str(caught.value)
    assert error_advice.text_of(caught.value) == str(caught.value)  # has its advice already
    assert "step 1" not in output.getvalue()
    frames = [entry.name for entry in caught.traceback]
    assert "decode" in frames  # the command shows this line


def test_decoding_without_memory_for_it_says_what_to_do(tmp_path: Path) -> None:
    said = r"^out of memory before the first step: Unable to allocate 5 GiB. (Reduce|The address)"
    with pytest.raises(OutOfMemoryError, match=said):
        modes.train(job_of("large", tmp_path, io.StringIO()))


def test_another_type_than_decoded_ends_the_run_before_the_first_step(tmp_path: Path) -> None:
    output = io.StringIO()
    said = r"Decoding.decode \(.*\) returns a str of length .*, but must return Decoded"
    with pytest.raises(TaskError, match=said):
        modes.train(job_of("type", tmp_path, output))
    assert "step 1" not in output.getvalue()


def test_an_error_after_invented_results_is_a_warning(tmp_path: Path) -> None:
    output = io.StringIO()
    with pytest.raises(KeyError):  # at the end
        modes.train(job_of("after", tmp_path, output))
    warning, end = output.getvalue().partition("step 2")[::2]
    assert "fails if all results of program.call are zeros: KeyError: 'scores'" in warning
    assert "trial" not in end


def test_an_error_about_the_type_of_a_result_is_not_said_to_be_about_zeros(tmp_path: Path) -> None:
    output = io.StringIO()
    with pytest.raises(TypeError):  # at the end
        modes.train(job_of("indexed", tmp_path, output))
    warning = " ".join(output.getvalue().partition("step 2")[0].split())
    assert (
        "with the results of program.call, whose types are those of the run: TypeError" in warning
    )
    assert "zeros" not in warning


@pytest.mark.parametrize("mistake", ["", "zeros", "endless", "early"])
def test_tasks_that_decode_are_traced_once_with_zeros_as_results(
    mistake: str, tmp_path: Path
) -> None:
    output = io.StringIO()
    assert modes.train(job_of(mistake, tmp_path, output)) == 0
    assert ("are zeros: ZeroDivisionError" in output.getvalue()) == (mistake == "zeros")
    if mistake != "early":
        assert len(TRACES) == 1
        assert [bool(one.any()) for one in VALUES] == [False, True]


@pytest.mark.parametrize("mistake", ["repeated", "folded"])
def test_random_numbers_that_are_equal_in_each_iteration_of_a_sampler_are_a_warning(
    mistake: str, tmp_path: Path
) -> None:
    output = io.StringIO()
    assert modes.train(job_of(mistake, tmp_path, output)) == 0
    before, after = output.getvalue().partition("step 2")[::2]
    said = "Decoding draws the same random numbers several times in decode: in a loop, or"
    assert (said in before) == (mistake == "repeated")
    assert said not in after


@pytest.mark.parametrize("mistake", ["before", "traced", "after"])
def test_a_run_that_does_not_decode_does_not_try_it(mistake: str, tmp_path: Path) -> None:
    output = io.StringIO()
    assert modes.train(job_of(mistake, tmp_path, output, decode_at_end=False)) == 0
    assert not TRACES and "zeros" not in output.getvalue()


def test_a_resumed_run_tries_it_too_unless_it_has_no_step_left(tmp_path: Path) -> None:
    assert modes.train(job_of("", tmp_path, io.StringIO())) == 0
    longer = job_of("before", tmp_path, io.StringIO())
    longer.tree.run.steps = 3
    with pytest.raises(DecodingError, match="tries it before the first one"):
        modes.train(longer)
    with pytest.raises(KeyError):
        modes.train(job_of("before", tmp_path, io.StringIO()))
