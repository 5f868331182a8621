"""Draws random configurations for `fuzz_executions.py`: a task, a learner and an execution."""

from __future__ import annotations

import math
import random
from typing import Any

Choices = dict[str, Any]

EXECUTIONS = {
    "replicas": 2,
    "towers": 1,
    "mesh": 6,
    "pipeline": 4,
    "spmd": 2,
    "mesh_stages": 2,
}
"""{execution: weight of drawing it}."""

TYPES = {"float32": 6, "bfloat16": 2, "float16": 1}
"""{type of the activations: weight of drawing it}."""

TEXT_DIMS = ("batch", "length", "embed", "mlp", "heads", "kv_heads", "head_dim", "vocab", "experts")
DIMS = {
    "images": ("batch", "height", "width", "channels", "in_channels", "out_channels"),
    "features": ("batch", "mlp", "embed", "classes"),
    "recurrent": ("batch", "mlp", "embed", "vocab"),
    "recurrent_pairs": ("batch", "mlp", "embed", "vocab"),
}
"""{task: dims that a rule may name}; other tasks: TEXT_DIMS."""


WEIGHTS_ONLY = ("experts", "in_channels", "out_channels")
"""Dims that no activation has together with "batch"."""


BLOCK: Choices = {
    "conv": "full",
    "channels": 4,
    "groups": 1,
    "kernel_shape": (3, 3),
    "strides": (1, 1),
    "dilations": (1, 1),
    "padding": "SAME",
    "norm": False,
    "pool": None,
}
"""A plain convolution."""

PLAIN: Choices = {
    "task": "language_model",
    "batch": 8,
    "layers": 1,
    "dropout": 0.1,
    "packed": False,
    "stack": "unrolled",
    "kv_heads": None,
    "positions": "rotary",
    "window": None,
    "norm": "rms",
    "norm_position": "pre",
    "feed_forward": "plain",
    "softmax": "tied",
    "smoothing": 0.0,
    "vocab": 32,
    "vocab_multiple": 1,
    "cell": "lstm",
    "residual": "none",
    "optimizers": ["adam"],
    "clip_global_norm": 1.0,
    "clip_tensor_norm": None,
    "ema_decay": 0.9,
    "accumulation": 1,
    "weight_decay": 0.01,
    "frozen": False,
    "activation_dtype": "float32",
    "execution": {"kind": "towers", "towers": 1, "xla": "none"},
}
"""A plain language model on one device, to which a test adds choices."""


def draw(seed: int, index: int) -> Choices:
    """Returns the choices of a case: a pure function of seed and index, of JSON values."""
    rng = random.Random(f"{seed}:{index}")
    execution = rng.choices(list(EXECUTIONS), list(EXECUTIONS.values()))[0]
    choices = {**_task(rng, execution), **_learner(rng)}
    choices["execution"] = _execution(rng, execution, choices)
    # From numbers of its own, so that the other choices of a case are those of earlier versions.
    of_type = random.Random(f"{seed}:{index}:activation_dtype")
    choices["activation_dtype"] = of_type.choices(list(TYPES), list(TYPES.values()))[0]
    return choices


def _task(rng: random.Random, execution: str) -> Choices:
    kinds = {"language_model": 5, "translation": 2, "prefix": 1, "recurrent": 2}
    kinds |= {"recurrent_pairs": 1, "reused": 2, "images": 4, "features": 1}
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    if execution == "spmd":
        kind = rng.choice(["language_model", "language_model", "reused"])
    choices: Choices = {
        "task": kind,
        "batch": rng.choice([8, 8, 8, 12, 16, 24]),
        "layers": rng.choice([1, 2, 2, 3]),
        "dropout": rng.choice([0.0, 0.1]),
        "packed": rng.random() < 0.3,
    }
    if kind == "images":
        return {**choices, **_images(rng)}
    if kind == "features":
        return choices
    stacks = ["repeated"] if execution == "spmd" else ["unrolled", "shared", "remat", "repeated"]
    softmax = rng.choice(["tied", "tied", "untied", "sampled"])
    return choices | {
        "stack": rng.choice([*stacks, "repeated_remat"]),
        "kv_heads": rng.choice([None, None, 2, 1]),
        "positions": rng.choice(["rotary", "relative", "learned", "none"]),
        "window": rng.choice([None, None, 3]),
        "norm": rng.choice(["rms", "layer"]),
        "norm_position": rng.choice(["pre", "pre", "post"]),
        "feed_forward": rng.choice(["plain", "plain", "gated", "switch", "top2"]),
        "softmax": softmax,
        "smoothing": rng.choice([0.0, 0.0 if softmax == "sampled" else 0.1]),
        "vocab": rng.choice([32, 32, 30]),
        "vocab_multiple": rng.choice([1, 8]),
        "cell": rng.choice(["lstm", "projected", "gru", "gru_after"]),
        "residual": rng.choice(["none", "add"]),
    }


def _images(rng: random.Random) -> Choices:
    def pair(*sizes: int) -> tuple[int, int]:
        return rng.choice(sizes), rng.choice(sizes)

    blocks = []
    for _ in range(rng.choice([1, 2, 3])):
        strides = rng.choice([(1, 1), (1, 1), (2, 2), (2, 1)])
        blocks.append(
            {
                "conv": rng.choice(["full", "full", "depthwise"]),
                "channels": rng.choice([2, 4]),
                "groups": rng.choice([1, 1, 2]),
                "kernel_shape": pair(1, 2, 3, 3),
                "strides": strides,
                "dilations": (1, 1) if strides != (1, 1) else rng.choice([(1, 1), (1, 1), (2, 1)]),
                "padding": rng.choice(["SAME", "SAME", "VALID"]),
                "norm": rng.random() < 0.5,
                "pool": rng.choice([None, None, "max", "average"]),
                "pooling": {
                    "window_shape": pair(2, 3),
                    "strides": rng.choice([(1, 1), (2, 2)]),
                },
            }
        )
    return {"image": rng.choice([(16, 16), (9, 9), (12, 8), (16, 6)]), "blocks": blocks}


def _learner(rng: random.Random) -> Choices:
    optimizers = ["adam", "adamw", "adafactor", "lamb", "lars", "sgd", "momentum", "nesterov"]
    optimizers += ["rmsprop", "adagrad"]
    return {
        "optimizers": rng.sample(optimizers, rng.choice([1, 1, 1, 2, 3])),
        "clip_global_norm": rng.choice([None, 1.0, 0.1]),
        "clip_tensor_norm": rng.choice([None, None, 0.5]),
        "ema_decay": rng.choice([0.0, 0.9]),
        "accumulation": rng.choice([1, 1, 1, 2]),
        "weight_decay": rng.choice([0.0, 0.01]),
        "frozen": rng.random() < 0.15,
    }


def _execution(rng: random.Random, kind: str, choices: Choices) -> Choices:
    if kind == "replicas":
        return {"kind": kind, "devices": rng.choice([2, 2, 4]), "xla": "none"}
    if kind == "towers":
        xla = rng.choice(["none", "none", "none", "clusters", "step"])
        return {"kind": kind, "towers": rng.choice([1, 2]), "xla": xla}
    if kind == "mesh":
        return {"kind": kind, **_mesh(rng, choices, most_devices=8)}
    pipeline: Choices = {
        "kind": kind,
        "num_stages": rng.choice([2, 2, 3, 4]),
        "num_micro_batches": rng.choice([1, 2, 2, 4]),
        "rematerialize": rng.choice(["none", "all"]),
        "num_replicas": rng.choice([1, 1, 1, 2]),
    }
    if kind == "spmd":
        return pipeline | {"num_stages": rng.choice([1, choices["layers"]])}
    schedules = ["gpipe", "1f1b", "1f1b", "interleaved_1f1b", "zero_bubble_h1"]
    pipeline["schedule"] = rng.choice(schedules)
    if pipeline["schedule"] == "interleaved_1f1b":
        pipeline |= {"num_stages": 2, "num_micro_batches": rng.choice([2, 4])}
    if rng.random() < 0.2:
        pipeline["rematerialize"] = "except_last"
    if kind == "mesh_stages":
        pipeline["num_stages"] = 2
        pipeline["stages_on"] = _mesh(rng, choices, most_devices=4)
    return pipeline


def _mesh(rng: random.Random, choices: Choices, *, most_devices: int) -> Choices:
    """Returns a mesh of one to three axes and rules, most of which are legal."""
    while True:
        axes = dict.fromkeys(rng.sample("xyz", rng.choice([1, 2, 2, 3])), 0)
        axes = {name: rng.choice([1, 2, 2, 2, 2, 4]) for name in axes}
        if 1 < math.prod(axes.values()) <= most_devices:
            break
    if rng.random() < 0.15:
        preset = rng.choice(["data", "fsdp", "tensor", "2d"])
        names = {"data": "data", "fsdp": "data", "tensor": "model", "2d": "data:2;model"}
        return {"mesh": f"{names[preset]}:2", "rules": preset}
    dims = list(DIMS.get(choices["task"], TEXT_DIMS))
    if choices.get("feed_forward") not in ("switch", "top2") and "experts" in dims:
        dims.remove("experts")
    rng.shuffle(dims)
    if rng.random() < 0.6:
        dims.sort(key="batch".__ne__)
    rules: dict[str, str] = {}
    for name in axes:
        for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
            if dims:
                rules[dims.pop(0)] = name
    if rng.random() < 0.8:  # of an axis of "batch", most other dims are illegal
        taken = rules.get("batch")
        rules = {d: a for d, a in rules.items() if a != taken or d in ("batch", *WEIGHTS_ONLY)}
    found = {
        "mesh": ";".join(f"{name}:{size}" for name, size in axes.items()),
        "rules": ";".join(f"{dim}:{axis}" for dim, axis in rules.items()),
    }
    for field in ("slots_axis", "weights_axis"):
        if rng.random() < 0.15:
            found[field] = rng.choice(list(axes))
    return found
