"""What a Lab or a Session answers if it is used like a model of Keras, PyTorch or Lightning."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from tekso.framework.counting import counted
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.input import ExampleInput, Input
from tekso.framework.params.origins import hide_from_origins

Method = TypeVar("Method", bound=Callable[..., Any])

hide_from_origins(__file__)  # `answering` only passes on the arguments

_DATA = (
    "the input of the experiment reads the data, and load(split) of an Arrays input may return "
    "any arrays (docs/first_task.md)"
)
_EVALUATION = "the experiment defines evaluation inputs: eval_inputs, such as HeldOut.Params()"
_RULES = (
    "set run.keep_best, run.early_stopping and other fields of run; docs/keras_and_pytorch.md "
    "lists them beside the callbacks of Keras"
)
_PARTS = (
    "the experiment defines the task with loss and metrics, the learner with the optimizer, and "
    "the input; SET={path: value} changes their Params"
)
_STEPS = 'SET={"run.steps": 100} sets the number of training steps'
_ARRAYS = (
    'SESSION.loss(SESSION.theta(), batch, mode="eval") returns the loss of other arrays, and '
    'SESSION.predict({"x": x}) predictions'
)


def _by_name(table: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {name: text for text, names in table.items() for name in names}


_ARGUMENTS = _by_name({
    _DATA: ("x", "y", "data", "dataset", "train_dataloader", "train_dataloaders"),
    _EVALUATION: ("validation_data", "validation_split", "dataloaders", "val_dataloaders"),
    _RULES: ("callbacks",),
    _PARTS: ("learning_rate", "loss", "lr", "metrics", "model", "optimizer"),
    'the size of a batch is a Param: SET={"input.batch_size": 32}': ("batch_size",),
    'the array "weights" of a batch weights its examples': ("class_weight", "sample_weight"),
    "a training input is shuffled in every epoch (input.order)": ("shuffle",),
    'SET={"run.seed": 1} sets the seed': ("seed",),
    "it prints about ten lines, or draws curves in a notebook": ("verbose",),
    "EPOCHS": ("epochs", "initial_epoch", "max_epochs", "num_epochs", "steps_per_epoch"),
})  # fmt: skip
"""{argument in other frameworks: what Tekso has for it}; for capitals, see `_filled`."""
_ARGUMENTS_OF = {
    "evaluate": _by_name({
        _ARRAYS: ("dataloaders", "sample_weight", "x", "y"),
        "max_batches=10 evaluates only the first 10 batches": ("steps",),
        'the size of a batch is a Param: SET={"eval_inputs.dev.batch_size": 32}': ("batch_size",),
    }),
    "predict": {"batch_size": "it computes all examples at once; call it for parts of them"},
    "__init__": _by_name({
        "settings are SET={path: value}": ("set", "settings"),
        _STEPS: ("epochs", "max_epochs", "max_steps", "num_epochs", "steps"),
    }),
}  # fmt: skip
_TAKES = {
    "fit": "the number of training steps, each with one batch: fit(100)",
    "train": "the number of training steps, each with one batch: train(100)",
    "evaluate": "the names of evaluation inputs, and max_batches",
    "predict": '{name: array}: predict({"x": x})',
    "sample": "no arguments; Params of the task, such as task.decode, say what it decodes",
}

_ATTRIBUTES = _by_name({
    _PARTS: ("compile", "configure_optimizers", "optimizer", "optimizers"),
    "TRAIN trains": ("fit", "fit_generator", "train", "train_on_batch", "train_step"),
    "EVALUATE evaluates": (
        "eval", "eval_step", "test", "test_on_batch", "test_step", "validate",
    ),
    "MODEL shows the weights": ("layers", "summary"),
    'SESSION.predict({"x": x}) predicts, by predict() of the task': (
        "call", "forward", "predict", "predict_on_batch", "predict_proba", "predict_step",
    ),
    "SESSION.theta() returns the weights, and SESSION.assign(theta) sets them": (
        "get_weights", "load_state_dict", "named_parameters", "parameters", "set_weights",
        "state_dict", "trainable_variables", "trainable_weights", "variables", "weights",
    ),
    "SESSION.save(folder) saves a run, which load_task and load_weights of "
    "tekso.framework.run.weights read": (
        "load", "load_from_checkpoint", "load_weights", "save", "save_checkpoint", "save_model",
        "save_weights",
    ),
    "a training step computes gradients and updates; SESSION.gradients(theta, batch) returns "
    "gradients": ("backward", "zero_grad"),
    "the execution places the weights; docs/executions.md": ("cpu", "cuda", "to"),
    "set learner.frozen, patterns of the paths of weights": ("requires_grad_", "trainable"),
})  # fmt: skip
"""{attribute of models in other frameworks: what a Lab or a Session has for it}."""


def answering(method: Method) -> Method:
    """Wraps a method: wrong arguments are a TypeError that says what to write instead."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if name not in signature.parameters]
            text = _wrong_call(self, method.__name__, unknown, len(args), str(error))
            if "EPOCHS" in text:
                epochs = next((kwargs[name] for name in kwargs if name.endswith("epochs")), None)
                text = text.replace("EPOCHS", _epochs(self, epochs))
            raise TypeError(text) from None
        return method(self, *args, **kwargs)

    return cast(Method, run)


def attribute_hint(used: object, name: str) -> str:
    """Returns ": " and what a Lab or Session has for an attribute of other models, or ""."""
    return f": {_filled(_ATTRIBUTES[name], used)}" if name in _ATTRIBUTES else ""


def arrays_hint(used: object) -> str:
    """Returns how to evaluate other arrays than those of evaluation inputs."""
    return _filled(_ARRAYS, used)


def shown(given: object) -> str:
    """Returns a value as it is shown in a message; of arrays only the type and shape."""
    shape = getattr(given, "shape", None)
    if shape is None:
        text = repr(given)
        return text if len(text) <= 80 else f"a {type(given).__name__}"
    return f"a {type(given).__name__} of shape {list(shape)}"


def epoch_steps(input: Input) -> float | None:
    """Returns how many batches an epoch of an input has; None: unknown."""
    if isinstance(input, BucketedInput) and type(input).batch is BucketedInput.batch:
        return input.batches_per_epoch
    if not isinstance(input, ExampleInput) or type(input).batch is not ExampleInput.batch:
        return None
    return float(input.num_examples / input.params.batch_size)


def _wrong_call(used: object, name: str, unknown: list[str], given: int, why: str) -> str:
    """Returns what is wrong with a call, what is allowed, and what to write instead."""
    table = {**_ARGUMENTS, **_ARGUMENTS_OF.get(name, {})}
    call = type(used).__name__ if name == "__init__" else f"{type(used).__name__}.{name}()"
    parts = [f"{call}: {', '.join(unknown)} is no argument" if unknown else f"{call}: {why}"]
    if name in _TAKES:
        parts.append(f"it takes {_TAKES[name]}")
    hints = [f"{one}: {table[one]}" for one in unknown if one in table]
    if given > 1 and name in ("fit", "train"):
        hints.append(_DATA)
    return _filled("; ".join([*parts, *hints]), used)


def _filled(text: str, used: object) -> str:
    """Returns a text with what a Lab or a Session is called in place of the words in capitals."""
    is_lab = type(used).__name__ == "Lab"
    own = "lab.session" if is_lab else "session"
    for word, found in {
        "SESSION": own,
        "SET": "set" if is_lab else "settings",
        "TRAIN": "lab.fit(steps)" if is_lab else "session.train(steps)",
        "EVALUATE": "lab.evaluate()" if is_lab else "session.evaluate(name)",
        "MODEL": "lab.model()" if is_lab else "model() of a Lab",
    }.items():
        text = text.replace(word, found)
    return text


def _epochs(used: Any, epochs: object) -> str:
    """Returns how many steps some epochs are."""
    rule = "the training examples divided by input.batch_size"
    session = getattr(used, "session", used)
    length = epoch_steps(session.input)
    if length is None:
        return f"an epoch has as many steps as {rule}"
    text = f"an epoch of this input has {length:g} steps ({rule})"
    if not isinstance(epochs, int) or epochs < 1:
        return text
    method = "train" if session is used else "fit"
    return f"{text}, so {method}({math.ceil(epochs * length)}) trains {counted(epochs, 'epoch')}"
