"""Writes the functions of a task as a SavedModel, which can be loaded without Tekso.

    runs/tiny/export/
      saved_model.pb, variables/       tf.saved_model.load("runs/tiny/export").signatures
      assets/export.json               inputs and outputs of the functions, the meaning of every id
      assets/…                         assets of the run, such as tokenizers
      texts/                           the same for texts, if the task has functions of texts

A signature takes any number of examples of any length up to the longest:

    ids [5, 9]  ─ pad rows ─►  [5, 16]  ─ split into batches ─►  [4, 16] [4, 16]  ─►  outputs [5, …]

The file has a separate function for each shape; all of them share the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from tekso.framework import files
from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction, ExportedTexts
from tekso.framework.json_text import to_json
from tekso.framework.task import Task

SEED = "seed"
DESCRIPTION = "export.json"
TEXTS = "texts"
_GRADIENT = "_gradient_op_type"  # attribute of a node: the name of its custom gradient


class ExportModule(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
    """The weights as variables, and the traced functions of a task over them.

    Args:
      task: the task.
      weights: the weights, by path.
      seed: seed of the run; random numbers depend on it.
    """

    def __init__(self, task: Task, weights: Mapping[str, np.ndarray], *, seed: int) -> None:
        super().__init__()
        self._task, self._seed = task, seed
        self.weights = {
            path: tf.Variable(value, trainable=False, name=path.replace("/", "."))
            for path, value in weights.items()
        }

    def trace(self, exported: ExportedFunction, *, batch_size: int, length: int) -> Any:
        """Returns the concrete function for one shape.

        Its arguments are the inputs by name. If it draws random numbers, it also has the arguments
        "seed" ([] int64) and "offset" ([] int32), the position of the first example among all.
        """
        shapes = {
            name: tf.TensorSpec([batch_size, *one.dims(length)], one.dtype, name)
            for name, one in exported.inputs.items()
        }
        if exported.is_random:
            shapes[SEED] = tf.TensorSpec([], tf.int64, SEED)
            shapes["offset"] = tf.TensorSpec([], tf.int32, "offset")

        def compute(**inputs: tf.Tensor) -> dict[str, tf.Tensor]:
            ctx = StepContext(
                mode="decode",
                seed=self._seed,
                step=inputs.get(SEED, 0),
                example_offset=inputs.get("offset", 0),
            )
            weights = {path: tf.convert_to_tensor(v) for path, v in self.weights.items()}
            values = [inputs[name] for name in exported.inputs]
            found = exported.function(self._task.theta(weights), *values, ctx)
            return {name: found[name] for name in exported.outputs}

        return tf.function(compute, autograph=False).get_concrete_function(**shapes)

    def signature(self, exported: ExportedFunction, *, batch_size: int) -> Any:
        """Returns the function to export, for any number of examples of any length.

        Args:
          exported: the function.
          batch_size: number of examples that are computed together; a single example is computed
            without padding to this number.
        """
        sizes = sorted({1, batch_size})
        traces = [
            _Trace(self.trace(exported, batch_size=size, length=length), size, length)
            for length in exported.lengths
            for size in sizes
        ]
        names = list(exported.inputs)
        lengths = tf.constant(list(exported.lengths))
        rows = [name for name in names if exported.inputs[name].has_length]
        specs = {
            name: tf.TensorSpec(
                [None, *([None] if one.has_length else []), *one.shape], one.dtype, name
            )
            for name, one in exported.inputs.items()
        }
        if exported.is_random:
            specs[SEED] = tf.TensorSpec([], tf.int64, SEED)

        def run(**inputs: tf.Tensor) -> dict[str, tf.Tensor]:
            count = tf.shape(inputs[names[0]])[0]
            own = {name: tf.shape(inputs[name])[1] for name in rows}
            length = tf.reduce_max(list(own.values())) if rows else lengths[-1]
            fits = [_fit(name, exported, own[name]) for name in rows]
            with tf.control_dependencies(fits):
                which = tf.searchsorted(lengths, [length])[0] * len(sizes)
            which += tf.cast(count > 1, tf.int32) * (len(sizes) - 1)
            branches = [
                functools.partial(_computed, trace, exported, inputs, traces[-1].function)
                for trace in traces
            ]
            found: dict[str, tf.Tensor] = tf.switch_case(which, branches)
            return found

        return tf.function(run, autograph=False).get_concrete_function(**specs)


def text_signature(compute: Any, texts: ExportedTexts) -> Any:
    """Returns the function of texts to export.

    Args:
      compute: the function of tokens, which it calls; see `ExportModule.signature`.
      texts: converts texts to its inputs, and its outputs to texts.
    """
    specs = {name: tf.TensorSpec([None], tf.string, name) for name in texts.inputs}

    def run(**inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return dict(texts.write(compute(**texts.read(inputs)), inputs))

    return tf.function(run, autograph=False).get_concrete_function(**specs)


def _fit(name: str, exported: ExportedFunction, length: tf.Tensor) -> Any:
    """Returns an op that checks that the rows of an input are not too long."""
    longest = exported.inputs[name].length_in(exported.lengths[-1])
    return tf.debugging.assert_less_equal(
        length, longest, message=f"rows of {name} are longer than the exported maximum, {longest}"
    )


@dataclasses.dataclass(frozen=True)
class _Trace:
    """A function for one shape."""

    function: Any
    batch_size: int
    length: int


def _computed(
    trace: _Trace,
    exported: ExportedFunction,
    inputs: Mapping[str, tf.Tensor],
    longest: Any,
) -> dict[str, tf.Tensor]:
    """Returns the outputs of a trace for any number of examples, padded to the longest outputs."""
    size = trace.batch_size
    count = tf.shape(next(iter(inputs.values())))[0]
    iterations = (count + size - 1) // size
    rows = tf.minimum(tf.range(iterations * size), count - 1)  # repeat the last one as padding

    def parts(name: str) -> tf.Tensor:
        one, value = exported.inputs[name], inputs[name]
        dims = one.dims(trace.length)
        if one.has_length:
            missing = dims[0] - tf.shape(value)[1]
            widths = [[0, 0], [0, missing], *([0, 0] for _ in one.shape)]
            value = tf.pad(value, widths, constant_values=tf.cast(one.padding, value.dtype))
        return tf.reshape(tf.gather(value, rows), [iterations, size, *dims])

    def iteration(arguments: tuple[dict[str, tf.Tensor], tf.Tensor]) -> dict[str, tf.Tensor]:
        values, offset = arguments
        extra = {SEED: inputs[SEED], "offset": offset} if exported.is_random else {}
        return dict(trace.function(**values, **extra))

    values = {name: parts(name) for name in exported.inputs}
    kinds = {name: tensor.dtype for name, tensor in trace.function.structured_outputs.items()}
    offsets = tf.range(iterations) * size
    found = tf.map_fn(iteration, (values, offsets), fn_output_signature=kinds)
    outputs = {}
    for name, one in exported.outputs.items():
        own = trace.function.structured_outputs[name].shape[1:]
        wanted = longest.structured_outputs[name].shape[1:]
        whole = tf.reshape(found[name], [iterations * size, *own])[:count]
        widths = [[0, 0], *([0, most - n] for n, most in zip(own, wanted, strict=True))]
        whole = tf.pad(whole, widths, constant_values=tf.cast(one.padding, whole.dtype))
        if one.length_of:
            whole = whole[:, : tf.shape(inputs[one.length_of])[1]]
        outputs[name] = whole
    return outputs


def write(
    path: str,
    module: ExportModule,
    exported: Mapping[str, ExportedFunction],
    *,
    batch_size: int,
    about: Mapping[str, Any],
    assets: Mapping[str, str],
    texts: Mapping[str, ExportedTexts],
) -> None:
    """Writes the SavedModel of some functions, and a second one of the functions that take texts.

    The second one is separate because loading it needs an additional package.

    Args:
      path: folder to write, which must not exist.
      module: the weights.
      exported: the functions by the names of their signatures.
      batch_size: see `ExportModule.signature`.
      about: values to write to `assets/export.json`, in addition to the functions.
      assets: files to include, {name: path}.
      texts: how some of the functions read and write texts, by the names of their signatures.
    """
    signatures = {
        name: module.signature(one, batch_size=batch_size) for name, one in exported.items()
    }
    record = {**about, "functions": {name: _function_record(one) for name, one in exported.items()}}
    with tempfile.TemporaryDirectory() as folder:
        description = os.path.join(folder, DESCRIPTION)
        files.write_atomically(description, to_json(record, indent=1, ensure_ascii=False) + "\n")
        for name, source in assets.items():
            files.write_atomically(os.path.join(folder, name), files.read(source))
        module.assets = [
            tf.saved_model.Asset(os.path.join(folder, name)) for name in (DESCRIPTION, *assets)
        ]
        _save(module, path, signatures)
    if texts:
        module.assets = []
        module.resources = [resource for one in texts.values() for resource in one.resources]
        of_texts = {name: text_signature(signatures[name], one) for name, one in texts.items()}
        _save(module, files.join(path, TEXTS), of_texts)


def _save(module: ExportModule, path: str, signatures: Mapping[str, Any]) -> None:
    tf.saved_model.save(
        module,
        path,
        signatures=dict(signatures),
        options=tf.saved_model.SaveOptions(experimental_custom_gradients=False),
    )
    _forget_custom_gradients(files.join(path, "saved_model.pb"))


def _forget_custom_gradients(path: str) -> None:
    """Removes the names of custom gradients from a saved graph, which does not contain them.

    Otherwise loading it would warn, once for each function, that the gradients are missing.
    """
    graph = saved_model_pb2.SavedModel.FromString(files.read(path))
    for meta in graph.meta_graphs:
        functions = (function.node_def for function in meta.graph_def.library.function)
        for nodes in (meta.graph_def.node, *functions):
            for node in nodes:
                if _GRADIENT in node.attr:
                    del node.attr[_GRADIENT]
    files.write_atomically(path, graph.SerializeToString(deterministic=True))


def _function_record(exported: ExportedFunction) -> dict[str, Any]:
    inputs = {
        name: {
            "dtype": tf.as_dtype(one.dtype).name,
            "shape": ["examples", *(["length"] if one.has_length else []), *one.shape],
            "padding": one.padding,
            **({"longest": one.length_in(exported.lengths[-1])} if one.has_length else {}),
            "doc": one.doc,
        }
        for name, one in exported.inputs.items()
    }
    if exported.is_random:
        inputs[SEED] = {
            "dtype": "int64",
            "shape": [],
            "doc": "each seed draws different random numbers",
        }
    has_rows = any(one.has_length for one in exported.inputs.values())
    return {
        "doc": exported.doc,
        "inputs": inputs,
        "outputs": {
            name: {"doc": one.doc, "padding": one.padding} for name, one in exported.outputs.items()
        },
        **({"longest": exported.lengths[-1]} if has_rows else {}),
    }
