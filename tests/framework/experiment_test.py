"""Experiments: one tree of copies from methods that return Params."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from tekso.framework.experiment import Experiment, KeepBest, Run, Tree
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.params import REQUIRED, Configurable, Params, param
from tekso.framework.schedules import Cosine
from tekso.models.layers.linear import Linear


class Model(Configurable):
    class Params(Configurable.Params):
        """Params of Model."""

        dim: int = param("Width.", default=REQUIRED)
        dropout: float = param("Rate.", default=0.0)


class Task(Configurable):
    class Params(Configurable.Params):
        """Params of Task."""

        model: Model.Params = param("Model.", default=Model.Params())


class Data(Configurable):
    class Params(Configurable.Params):
        """Params of Data."""

        batch_size: int = param("Global, in examples.", default=4)


class Part(Configurable):
    pass


SHARED = Data.Params(batch_size=3)


class Small(Experiment):
    """A small one."""

    def task(self) -> Params:
        return Task.Params().set({"model.dim": 8})

    def input(self) -> Params:
        return SHARED

    def eval_inputs(self) -> dict[str, Params]:
        return {"dev": SHARED, "test-2": Data.Params(batch_size=5)}

    def learner(self) -> Params:
        return Part.Params()

    def execution(self) -> Params:
        return Part.Params()


class Wide(Small):
    """The same, wider."""

    def task(self) -> Params:
        return super().task().set({"model.dim": 16})

    def run(self) -> Params:
        return Run.Params(steps=20)


def test_the_tree_has_all_parts() -> None:
    tree = Wide().tree()
    assert list(tree.fields()) == ["task", "input", "eval_inputs", "learner", "execution", "run"]
    assert (tree.get("task.model.dim"), tree.run.steps) == (16, 20)
    tree.set_text("eval_inputs.dev.batch_size", "7").set_text("*.dropout", "0.5")
    tree.set({"eval_inputs.test-2.batch_size": 9, "run.keep_best.metric": "bits_per_byte"})
    assert tree.eval_inputs["dev"].batch_size == 7 and tree.task.model.dropout == 0.5
    with pytest.raises(AttributeError, match=r"did you mean eval_inputs\.dev"):
        tree.set_text("eval_inputs.dve.batch_size", "7")
    with pytest.raises(AttributeError, match=r"did you mean task\.model\.dropout"):
        tree.set_text("task.model.dropuot", "0.5")


def test_trees_share_nothing_with_each_other_or_the_module() -> None:
    tree = Small().tree()
    tree.input.batch_size = 100
    tree.eval_inputs["dev"].batch_size = 100
    tree.task.model.dim = 100
    assert SHARED.batch_size == 3
    assert Small().tree() == Small().tree() != tree
    assert Small().tree().get("task.model.dim") == 8


def test_a_variant_differs_where_it_says() -> None:
    lines = Small().tree().diff(Wide().tree()).splitlines()
    assert [line.partition("  #")[0] for line in lines] == [
        "task.model.dim : 8 -> 16",
        "run.steps : 1000 -> 20",
    ]
    assert all("experiment_test.py:" in line for line in lines)


def test_origins_name_the_experiment_and_not_the_framework() -> None:
    tree = Small().tree()
    for path in ("task", "task.model.dim", "input", "input.batch_size", "eval_inputs"):
        assert "experiment_test.py:" in tree.origin(path)
    method = Small.task.__code__
    assert tree.origin("task").endswith(f":{method.co_firstlineno}")
    assert tree.origin("task.model.dim").endswith(f":{method.co_firstlineno + 1}")
    assert tree.origin("task.model.dropout") == tree.origin("run") == "default"


def test_the_tree_survives_as_text() -> None:
    tree = Small().tree()
    text = tree.to_text()
    assert 'eval_inputs : {"dev": Params(' in text and "eval_inputs.dev.batch_size : 3\n" in text
    assert Tree.Params.from_text(text) == tree


@pytest.mark.parametrize("name", ["task", "input"])
def test_task_and_input_have_to_be_there(name: str) -> None:
    class Nothing(Experiment):
        """Without parts."""

    with pytest.raises(NotImplementedError, match=rf"Nothing\.{name}\(\) must return Params"):
        getattr(Nothing(), name)()
    assert Nothing().eval_inputs() == {} and Nothing().run() == Run.Params()


def test_other_values_than_params_name_the_method() -> None:
    class Wrong(Small):
        def task(self) -> Params:
            return Task.Params  # type: ignore[return-value]

    class Missing(Small):
        def input(self) -> Params:
            return None  # type: ignore[return-value]

    class NotCalled(Small):
        def input(self) -> Params:
            return Data  # type: ignore[return-value]

    class NotCalledInDict(Small):
        def eval_inputs(self) -> dict[str, Params]:
            return {"dev": Data}  # type: ignore[dict-item]

    class NoDict(Small):
        def eval_inputs(self) -> dict[str, Params]:
            return [SHARED]  # type: ignore[return-value]

    class BadName(Small):
        def eval_inputs(self) -> dict[str, Params]:
            return {"a.b": SHARED}

    with pytest.raises(TypeError, match=r"Wrong: task \(.* call it, Task\.Params\(\)"):
        Wrong().tree()
    with pytest.raises(TypeError, match=r"Missing: input \(.*:\d+\) must .*, given None: is a ret"):
        Missing().tree()
    with pytest.raises(TypeError, match=r"given the class Data: write Data\.Params\(\)$"):
        NotCalled().tree()
    with pytest.raises(TypeError, match=r"eval_inputs\.dev \(.*:\d+\) must .*: write Data\.Params"):
        NotCalledInDict().tree()
    with pytest.raises(TypeError, match=r"NoDict\.eval_inputs\(\) must return a dict"):
        NoDict().tree()
    with pytest.raises(ValueError, match=r"'a\.b' is not a valid name"):
        BadName().tree()


def test_a_part_that_is_no_method_of_the_experiment_is_named() -> None:
    class Attribute(Small):
        task = Task.Params()  # type: ignore[assignment]

    class NoSelf(Small):
        def task() -> Params:  # type: ignore[misc]
            return Task.Params()

    class TooMany(Small):
        def run(self, steps: int) -> Params:  # type: ignore[override]
            return Run.Params(steps=steps)

    class Nested(Small):
        class input(Small):  # noqa: N801
            pass

    class Bound(Small):
        task = staticmethod(functools.partial(Small().task))  # type: ignore[assignment]

    class BoundTooFew(Small):
        task = staticmethod(functools.partial(TooMany.run))  # type: ignore[assignment]

    assert Bound().tree().task == Small().tree().task
    with pytest.raises(TypeError, match=r"BoundTooFew\.task\(…\) \(.*:\d+\) must have self"):
        BoundTooFew().tree()
    with pytest.raises(TypeError, match=r"Attribute\.task is .*, but must be a method: def task"):
        Attribute().tree()
    with pytest.raises(TypeError, match=r"NoSelf\.task\(\) \(.*:\d+\) must .*: def task\(self\)"):
        NoSelf().tree()
    with pytest.raises(TypeError, match=r"TooMany\.run\(self, steps\) \(.*:\d+\) must"):
        TooMany().tree()
    with pytest.raises(TypeError, match=r"Nested\.input is .*, but must be a method: def input"):
        Nested().tree()


def test_a_run_checks_its_numbers() -> None:
    assert Run.Params(steps=0).instantiate().params.steps == 0
    for name in ("steps", "eval_every_steps", "keep_best.count"):
        with pytest.raises(ValueError, match=rf"run\.{name} is -1"):
            Run.Params().set({name: -1}).instantiate()
    assert Run.Params(seed=2**64 - 1).instantiate()
    with pytest.raises(ValueError, match=r"^run.seed is 18446744073709551616, .* below 2\*\*64$"):
        Run.Params(seed=2**64).instantiate()
    with pytest.raises(ValueError, match="log_every_steps is 0"):
        Run.Params(log_every_steps=0).instantiate()
    with pytest.raises(TypeError, match=r"goal: must be Literal"):
        Run.Params(keep_best=KeepBest.Params(goal="minimum"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("part", "params", "base", "cure"),
    [
        ("learner", SGD.Params(), "LearnerBase", ": write Learner.Params(optimizer=SGD.Params(…))"),
        (
            "learner",
            Cosine.Params(),
            "learning_step.LearnerBase",
            ": write Learner.Params(optimizer=…, schedule=Cosine.Params(…))",
        ),
        (
            "task",
            Linear.Params(),
            "task.Task",
            ": write Classification.Params(model=Linear.Params(…))",
        ),
        ("input", SGD.Params(), "input.Input", ""),
    ],
)
def test_a_part_of_another_kind_is_refused(part: str, params: Params, base: str, cure: str) -> None:
    class Wrong(Small):
        """Returns a part of the wrong kind."""

    setattr(Wrong, part, lambda self: params)
    what = rf"Wrong.{part} \(.*experiment_test.py:\d+\) returns .* subclass of .*{base}"
    what += re.escape(cure) + "$"
    with pytest.raises(TypeError, match=what):
        Wrong().tree()


@pytest.mark.parametrize(
    ("kind", "name", "instead"),
    [
        (SGD, "learning_rate", "the learner has the learning rate, as a schedule: Learner.Params("),
        (AdamW, "lr", "the learner has the learning rate, as a schedule: Learner.Params("),
        (Learner, "learning_rate", "set schedule, for example schedule=Constant.Params(value=…)"),
        (Run, "callbacks", "set early_stopping, keep_best and the other fields"),
        (Run, "epochs", "set steps; an epoch has as many as the examples divided by input.batch"),
    ],
)
def test_names_of_other_frameworks_are_answered_with_what_to_write(
    kind: Any, name: str, instead: str
) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"has no field {name}: {instead}")):
        kind.Params(**{name: 3})


@pytest.mark.parametrize(
    ("field", "kind", "hint"),
    [
        ("optimizer", "Adam", r"of Keras: did you mean Adam\.Params\(…\)\?"),
        ("schedule", "ExponentialDecay", r"of Keras: did you mean Exponential\.Params\(…\)\?"),
        ("schedule", "Sequential", r"of Keras: docs/keras_and_pytorch\.md"),
    ],
)
def test_an_object_of_keras_is_answered_with_the_params_to_write(
    field: str, kind: str, hint: str
) -> None:
    given = type(kind, (), {"__module__": "keras.src.some"})()
    with pytest.raises(TypeError, match=rf"{field}: must be .*, given {kind} <.*\({hint}\)"):
        Learner.Params(**{field: given})


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("tensorflow.python.data.ops.dataset_ops", r"from load\(split\) of a subclass of Arrays"),
        ("keras.src.models.sequential", r"docs/keras_and_pytorch\.md has the classes"),
    ],
)
def test_a_part_of_another_library_is_answered_with_where_it_belongs(
    module: str, hint: str
) -> None:
    class Foreign(Experiment):
        def input(self) -> Any:
            return type("Given", (), {"__module__": module})()

    with pytest.raises(TypeError, match=f"must be Params, given Given <.*{hint}"):
        Foreign()._part("input", Foreign().input())
