"""Settings that the experiments of several tasks share: texts as bytes, and narrow models."""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Experiment, KeepBest, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.task_inputs import OneTask
from tekso.framework.input.tokenizers import Bytes
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import Params
from tekso.tasks.mt.bucketed_pairs import BucketedPairs
from tekso.tasks.mt.pairs import PairSource


class NarrowExperiment(Experiment):
    """The base of experiments with narrow models, trained by Adam on the local devices."""

    learning_rate = 0.002

    def learner(self) -> Params:
        """Adam; the learning rate rises, then falls to zero at the end of the run."""
        return Learner.Params(
            optimizer=Adam.Params(beta2=0.98),
            schedule=schedules.Linear.Params(initial_value=self.learning_rate, warmup_steps=200),
            clip_global_norm=1.0,
        )

    def execution(self) -> Params:
        """The local devices without XLA, which would only delay the start of so narrow a model."""
        return DataParallel.Params(xla="none")


def pairs_of_bytes(
    corpus: PairSource.Params, *, length: int, bound: int, batch_size: int = 16
) -> BucketedPairs.Params:
    """Returns an input of pairs of up to `length` bytes on each side, in two buckets."""
    return BucketedPairs.Params(
        corpus=corpus,
        tokenizer=Bytes.Params(),
        source_length=length,
        target_length=length,
        bounds=[bound],
        fill="tokens",
        batch_size=batch_size,
    )


def held_out(**inputs: HeldOut.Params) -> dict[str, Params]:
    """Returns the evaluation inputs of tasks, "TASK_dev"."""
    return {f"{task}_dev": OneTask.Params(task=task, input=p) for task, p in inputs.items()}


def run_of(steps: int, metric: str, *, every_steps: int | None = None) -> Run.Params:
    """Returns a run that keeps the best checkpoint by a metric, "TASK/NAME".

    Args:
      steps: number of steps.
      metric: the metric, on the held-out data of its task.
      every_steps: steps between evaluations; None: half of all steps.
    """
    every_steps = every_steps or steps // 2
    return Run.Params(
        steps=steps,
        eval_every_steps=every_steps,
        checkpoint_every_steps=every_steps,
        keep_best=KeepBest.Params(metric=metric, eval_input=f"{metric.partition('/')[0]}_dev"),
    )
