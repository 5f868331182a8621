"""A Lab and a Session say what to write instead of the calls of Keras and PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_tasks import Flowers

from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.input import Input
from tekso.framework.run.foreign_calls import epoch_steps
from tekso.framework.run.lab import Lab
from tekso.framework.run.session import Session
from tekso.framework.run.session_batches import SessionError

X = np.zeros([1000, 3], np.float32)


def session_of(input: Any) -> Any:
    session = Session.__new__(Session)
    session.input, session.step, session.eval_inputs = input, 0, {"dev": input}
    session.tree = SimpleNamespace(run=SimpleNamespace(steps=9))  # type: ignore[assignment]
    return session


@pytest.fixture(name="session", scope="module")
def _session() -> Any:
    return session_of(Flowers.Params(batch_size=8).instantiate())


@pytest.fixture(name="lab", scope="module")
def _lab(session: Any) -> Any:
    lab = Lab.__new__(Lab)
    lab.session = session
    return lab


def test_epochs_are_answered_with_the_number_of_steps(lab: Any, session: Any) -> None:
    said = (
        r"^Lab\.fit\(\): epochs is no argument; it takes the number of training steps, each with "
        r"one batch: fit\(100\); epochs: an epoch of this input has 15 steps \(the training "
        r"examples divided by input.batch_size\), so fit\(45\) trains 3 epochs$"
    )
    with pytest.raises(TypeError, match=said):
        lab.fit(epochs=3)
    with pytest.raises(TypeError, match=r"^Session\.train.*so train\(30\) trains 2 epochs$"):
        session.train(num_epochs=2)
    with pytest.raises(TypeError, match=r"epochs, batch_size is no .*\"input\.batch_size\": 32"):
        lab.fit(epochs=3, batch_size=4)


class Rows(BucketedInput):
    """Ten rows."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.assign([1] * 5 + [9] * 5, [2, 9], [4, 2])


class Steps(Input):
    """No examples are known."""


class Unequal(Flowers):
    """Its own batches."""

    def batch(self, step: int) -> Any:
        """See Flowers."""
        return super().batch(step)


@pytest.mark.parametrize(
    ("params", "steps"),
    [
        (Flowers.Params(batch_size=16), 7.5),
        (Rows.Params(batch_size=2), 5),
        (Steps.Params(), None),
        (Unequal.Params(batch_size=16), None),
    ],
)
def test_epochs_are_counted_where_the_input_allows_it(params: Any, steps: float | None) -> None:
    input = params.instantiate()
    assert epoch_steps(input) == steps
    if steps is None:
        with pytest.raises(TypeError, match="as many steps as the training examples divided by"):
            session_of(input).train(epochs=3)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda lab: lab.fit(), r"^Lab.fit\(\): missing .*'steps'; it takes the number of"),
        (lambda lab: lab.fit(X, X), r"reads the data, and load\(split\) of an Arrays input"),
        (lambda lab: lab.fit(2, validation_data=X), "defines evaluation inputs: eval_inputs"),
        (lambda lab: lab.fit(2, callbacks=[]), r"callbacks: set run.keep_best, run.early_stopping"),
        (lambda lab: lab.fit(2, verbose=0), "verbose: it prints about ten lines"),
        (lambda lab: lab.fit(2, unheard_of=0), r"^Lab.fit\(\): unheard_of is no argument; it take"),
        (lambda lab: lab.evaluate(x=X, y=X), r"x: lab\.session\.loss\(lab\.session\.theta\(\)"),
        (lambda lab: lab.evaluate(steps=3), "max_batches=10 evaluates only the first 10 batches"),
        (lambda lab: lab.sample("Once upon"), r"task\.decode, say what it decodes"),
        (lambda lab: lab.session.predict(X, batch_size=3), "call it for parts of them"),
        (lambda _: Lab("image.digits.Mlp", epochs=3), r'^Lab: .*set=\{"run.steps": 100\} sets'),
        (lambda _: Lab("image.digits.Mlp", settings={}), r"settings are set=\{path: value\}"),
        (lambda _: Session("image.digits.Mlp", set={}), r"settings are settings=\{path: value\}"),
        (lambda _: Session("image.digits.Mlp", lr=1), r"lr: .*; settings=\{path: value\} changes"),
    ],
)
def test_arguments_of_other_frameworks_are_answered(call: Any, said: str, lab: Any) -> None:
    with pytest.raises(TypeError, match=said):
        call(lab)


def test_arrays_in_place_of_steps_or_names_are_not_printed(lab: Any) -> None:
    with pytest.raises(SessionError, match=r"^steps is a ndarray of shape \[1000, 3\], but must"):
        lab.fit(X)
    said = r"input a ndarray of shape \[1000, 3\]; there are: dev\. session\.loss\(.*predictions$"
    with pytest.raises(SessionError, match=said):
        lab.evaluate(X, X)


@pytest.mark.parametrize(
    ("name", "of_lab", "of_session"),
    [
        ("compile", "; set={path: value} changes", "; settings={path: value} changes"),
        ("fit", None, r": session.train\(steps\) trains"),
        ("eval", r": lab.evaluate\(\) evaluates", r": session.evaluate\(name\) evaluates"),
        ("summary", r": lab.model\(\) shows", r": model\(\) of a Lab shows"),
        ("state_dict", r": lab.session.theta\(\) returns", r": session.theta\(\) returns"),
        ("cuda", "docs/executions.md$", "docs/executions.md$"),
        ("save_weights", r": lab.session.save\(folder\)", r": session.save\(folder\)"),
        ("train", r"its session has: lab.session.train$", None),
        ("unheard_of", "; it has: ", "$"),
    ],
)
def test_attributes_of_other_frameworks_are_answered(
    name: str, of_lab: str | None, of_session: str | None, lab: Any, session: Any
) -> None:
    for said, used in ((of_lab, lab), (of_session, session)):
        if said is not None:
            with pytest.raises(AttributeError, match=rf"'{name}'.*{said}"):
                getattr(used, name)
