"""The workloads in Tekso, through the parts that tekso-trainer uses."""

from __future__ import annotations

import concurrent.futures
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import workloads
from benchmarks.frameworks import Built, Weights
from tekso.framework import schedules
from tekso.framework.context import StepContext, filling_in_place
from tekso.framework.cores import num_cores
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.arrays import Arrays
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import REQUIRED, Params, param
from tekso.framework.run.assembly import assemble
from tekso.framework.run.software_versions import versions
from tekso.framework.task import Batch, LossSums, Task
from tekso.framework.theta import Theta
from tekso.models.amoebanet import AmoebaNet
from tekso.models.decoding.beam_search import BeamSearch
from tekso.models.encoder_decoder import DECODER_LAYER, ENCODER_LAYER, EncoderDecoder
from tekso.models.layers.conformer_block import ConformerBlock, ConvolutionModule
from tekso.models.layers.log_mel import kaldi_log_mel
from tekso.models.layers.normalization import BatchNorm
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import Stack
from tekso.models.lstm_lm import LstmLm
from tekso.models.resnet import resnet
from tekso.params.lm.benchmark import Small
from tekso.tasks.classification.task import Classification
from tekso.tasks.lm.task import LanguageModel


class _Fixed(Arrays):
    """The batch of a workload."""

    class Params(Arrays.Params):
        """Params of _Fixed."""

        workload: str = param("Name of the workload.", default=REQUIRED)
        is_tiny: bool = param("Whether its size only checks the code.", default=False)

    def load(self, split: str) -> Any:
        """See `Arrays`."""
        p = self.params
        found = (workloads.TINY if p.is_tiny else workloads.WORKLOADS)[p.workload].batch()
        if "ids" in found:
            found["weights"] = np.ones(found["ids"].shape, np.float32)
        return found


class _Translating(Task):
    """A task that only decodes."""

    class Params(Task.Params):
        """Params of _Translating."""

        model: EncoderDecoder.Params = param("The network.", default=REQUIRED)

    model: EncoderDecoder

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("model", self.params.model)

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """See `Task`."""
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
        """See `Task`."""
        raise NotImplementedError("this task only decodes")


class _Frames(Task):
    """Conformer blocks and a softmax over tokens in every frame."""

    class Params(Task.Params):
        """Params of _Frames."""

        block: ConformerBlock.Params = param("Every block.", default=REQUIRED)
        num_layers: int = param("Number of blocks.", default=REQUIRED)
        vocab_size: int = param("Tokens.", default=REQUIRED)

    blocks: list[ConformerBlock]
    softmax: Softmax

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child_list("blocks", [p.block] * p.num_layers)
        size = {"input_dim": p.block.dim, "vocab_size": p.vocab_size}
        self.child("softmax", Softmax.Params(use_bias=True, **size))

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """See `Task`."""
        return tf.reduce_sum(batch["weights"]) * batch["labels"].shape[1]

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
        """See `Task`."""
        x = batch["x"]
        for i, block in enumerate(self.blocks):
            x = block.fprop(theta.blocks[str(i)], x, ctx.fold(i))
        nats = self.softmax.cross_entropy(theta.softmax, x, batch["labels"], ctx)
        return LossSums(tf.reduce_sum(nats * tf.expand_dims(batch["weights"], 1)))


class _Transformer(Small):
    """lm.benchmark.Small in the sizes of a workload."""

    def __init__(self, workload: workloads.Transformer) -> None:
        self.VOCAB_SIZE, self.DIM = workload.vocab_size, workload.dim
        self.NUM_HEADS, self.NUM_LAYERS = workload.num_heads, workload.num_layers


def _task(workload: workloads.Workload) -> Params:
    if isinstance(workload, workloads.Transformer):
        return _Transformer(workload).task()
    if isinstance(workload, workloads.Lstm):
        stack = RecurrentStack.Params(
            num_layers=workload.num_layers, cell=LstmCell.Params(hidden_dim=workload.dim)
        )
        model: Any = LstmLm.Params(
            vocab_size=workload.vocab_size, embedding_dim=workload.dim, stack=stack
        )
        return LanguageModel.Params(model=model)
    if isinstance(workload, workloads.ResNet):
        model = resnet(
            18,
            num_blocks=list(workload.num_blocks),
            width=workload.width,
            channels=3,
            classes=workload.classes,
        )
        return Classification.Params(model=model, num_classes=workload.classes)
    if isinstance(workload, workloads.AmoebaNet):
        model = AmoebaNet.Params(
            num_layers=workload.num_layers,
            filters=workload.filters,
            image_size=workload.image_size,
            classes=workload.classes,
        )
        return Classification.Params(model=model, num_classes=workload.classes)
    if isinstance(workload, workloads.Conformer):
        return _conformer(workload)
    if isinstance(workload, workloads.FrontEnd):
        raise ValueError("the front end trains nothing")
    layers = []
    for layer in (ENCODER_LAYER.copy(), DECODER_LAYER.copy()):
        layer.attention.num_heads = workload.num_heads
        if layer.memory_attention is not None:
            layer.memory_attention.num_heads = workload.num_heads
        layer.feed_forward.hidden_dim = workload.hidden_dim
        layers.append(Stack.Params(num_layers=workload.num_layers, layer=layer))
    return _Translating.Params(
        model=EncoderDecoder.Params(
            source_vocab_size=workload.vocab_size,
            target_vocab_size=workload.vocab_size,
            dim=workload.dim,
            encoder=layers[0],
            decoder=layers[1],
        )
    )


def _conformer(workload: workloads.Conformer) -> Params:
    norm = BatchNorm.Params(epsilon=workloads.BATCH_NORM_EPSILON, decay=workloads.BATCH_NORM_DECAY)
    block = ConformerBlock.Params(
        dim=workload.dim,
        num_heads=workload.num_heads,
        positions=None,
        expansion=workload.hidden_dim // workload.dim,
        convolution=ConvolutionModule.Params(kernel_size=workload.kernel_size, norm=norm),
    )
    return _Frames.Params(
        block=block, num_layers=workload.num_layers, vocab_size=workload.vocab_size
    )


class _Workload(Experiment):
    """A workload as an experiment."""

    def __init__(self, workload: workloads.Workload) -> None:
        self.workload = workload

    def task(self) -> Params:
        """The model of the workload."""
        return _task(self.workload)

    def input(self) -> Params:
        """Its batch."""
        is_tiny = self.workload in workloads.TINY.values()
        known = workloads.TINY if is_tiny else workloads.WORKLOADS
        name = next(name for name, one in known.items() if one == self.workload)
        return _Fixed.Params(workload=name, is_tiny=is_tiny, batch_size=self.workload.batch_size)

    def learner(self) -> Params:
        """Adam, as for the other frameworks."""
        optimizer = Adam.Params(
            beta1=workloads.BETA1, beta2=workloads.BETA2, epsilon=workloads.EPSILON
        )
        constant = schedules.Constant.Params(value=workloads.LEARNING_RATE)
        return Learner.Params(optimizer=optimizer, schedule=constant)

    def execution(self) -> Params:
        """Data-parallel; a part of the batch on each core, also of the Conformer."""
        is_conformer = isinstance(self.workload, workloads.Conformer)
        return DataParallel.Params(towers=_num_parts(self.workload) if is_conformer else None)

    def run(self) -> Params:
        """The steps are counted by the worker."""
        return Run.Params(steps=1000)


def _num_parts(workload: workloads.Workload) -> int:
    """Returns the number of cores, or 1 if the batch does not divide evenly."""
    return 1 if workload.batch_size % num_cores() else num_cores()


def build(workload: workloads.Workload, weights: Weights, variant: str) -> Built:
    """Returns the workload; it draws its weights itself, and there are no variants."""
    del weights, variant
    if isinstance(workload, workloads.FrontEnd):
        return Built(_features(workload), 0, versions(), dict)
    tree = _Workload(workload).tree().set(eval_inputs={})
    with tempfile.TemporaryDirectory() as folder:
        parts = assemble(tree, assets_dir=folder)
    program = parts.program
    program.initialize()

    if isinstance(workload, workloads.BeamSearch):
        step = _search(parts.task, program, workload)
    else:
        batch, count = workload.batch(), iter(range(1_000_000))
        if "ids" in batch:
            batch["weights"] = np.ones(batch["ids"].shape, np.float32)
        else:
            batch["weights"] = np.ones(workload.batch_size, np.float32)

        def step() -> float:
            return float(program.train_step(batch, next(count))["loss"])

    def export() -> dict[str, Any]:
        prefix = "weights/"
        return {
            key.removeprefix(prefix): value
            for key, value in program.state().items()
            if key.startswith(prefix)
        }

    trained = [spec for spec in parts.task.specs().values() if spec.trainable]
    return Built(step, sum(spec.size for spec in trained), versions(), export)


def _features(workload: workloads.FrontEnd) -> Callable[[], float]:
    """Returns a step that computes the features of all recordings."""
    front_end = kaldi_log_mel(
        sample_rate=workload.sample_rate, num_channels=workload.num_channels
    ).instantiate()
    ctx = StepContext()
    run = tf.function(lambda x: front_end.fprop(Theta(), x, ctx).features, autograph=False)
    samples = tf.constant(workload.batch()["samples"])
    return lambda: float(run(samples).numpy().mean())


def _search(task: Any, program: Any, workload: workloads.BeamSearch) -> Callable[[], float]:
    """Returns the search of all sources, some on each core at a time, as the translator does."""
    search = BeamSearch.Params(
        beam_size=workload.beam_size,
        max_length=workload.steps,
        max_length_ratio=None,
        min_length=workload.steps + 1,  # no target ends earlier
        length_normalization=0.0,
        stop="never",
    ).instantiate()

    def run(theta: Theta, ids: tf.Tensor, segment_ids: tf.Tensor, ctx: StepContext) -> Any:
        batch = {"source_ids": ids, "source_segment_ids": segment_ids}
        ctx = filling_in_place(ctx)
        found = search.search(task.model, theta.model, batch, ctx, workloads.END_ID)
        return found["log_probs"]

    sources = workload.batch()["source_ids"]
    parts = min(len(sources), num_cores())
    batches = [tf.constant(part) for part in np.array_split(sources, parts)]
    pool = concurrent.futures.ThreadPoolExecutor(parts)
    program.call(run, batches[0], tf.ones_like(batches[0]))  # traced once, before the threads

    def one(ids: tf.Tensor) -> Any:
        return np.asarray(program.call(run, ids, tf.ones_like(ids)))

    def step() -> float:
        return float(np.concatenate(list(pool.map(one, batches)))[:, 0].mean())

    return step
