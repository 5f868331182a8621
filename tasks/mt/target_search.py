"""Searches for the targets of sources with the weights of a run, several batches at a time.

On a CPU, a batch keeps little more than one core busy, so several batches are searched at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from tekso.framework.commands import typed
from tekso.framework.context import StepContext, filling_in_place
from tekso.framework.cores import num_cores
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.params import Configurable, param
from tekso.framework.task import Program
from tekso.framework.theta import Theta
from tekso.models.decoding.beam_search import BeamSearch
from tekso.models.decoding.search import Search

Plan = TypeVar("Plan")


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A target that a search has found.

    Attributes:
      text: the detokenised text.
      ids: its tokens, without the end token.
      score: ranks hypotheses: the log-probability, normalised by the search.
      log_prob: log-probability of all tokens and the end token, in nats.
    """

    text: str
    ids: np.ndarray
    score: float
    log_prob: float

    def record(self) -> dict[str, Any]:
        """Returns text, score and log-probability, for JSON."""
        return {"text": self.text, "score": self.score, "log_prob": self.log_prob}


class SearchedTask(Protocol):
    """A task whose model is searched.

    Attributes:
      model: the model, a `Decoder`.
      params: Params of the task, with those of the model.
    """

    model: Any
    params: Any


class TargetSearch(Configurable):
    """Base of the classes that search for targets of batches of sources."""

    class Params(Configurable.Params):
        """Params of TargetSearch."""

        search: Search.Params = param("The search for targets.", default=BeamSearch.Params())
        num_searches: int | None = param(
            "Batches that are searched at a time; each needs memory. None: one per CPU core, at "
            "most 4, and one on other devices.",
            default=None,
        )
        xla: Literal["none", "search"] = param(
            "What XLA compiles: nothing, or a whole search as one program. Compilation takes "
            "seconds per batch shape; it pays off with many texts and a small model.",
            default="none",
        )

    sizes: ClassVar[Sequence[str]] = ("num_searches",)
    """Fields of the Params that must be at least 1, if they are set."""

    unit: ClassVar[str] = "targets"
    """What is found, in the plural, for messages."""

    def __init__(self, params: Any, *, task: SearchedTask) -> None:
        """Checks the numbers.

        Args:
          params: see Params.
          task: has the model, a `Decoder`, whose Params have target_vocab_size.
        """
        super().__init__(params)
        p = self.params
        for name in self.sizes:
            if p.get(name) is not None and p.get(name) < 1:
                raise ValueError(f"{p.path_of(name)} is {p.get(name)}, must be at least 1")
        self._model = task.model
        self._vocab_size = task.params.model.target_vocab_size
        self._search: Search = p.search.instantiate()
        self._functions: dict[Any, Callable[..., Any]] = {}

    @property
    def longest_target(self) -> int | None:
        """Most tokens of a target, end included; None: depends on the source alone."""
        longest: int | None = self._search.params.max_length
        return longest

    def forbidden_ids(self, tokenizer: Tokenizer) -> range:
        """Returns the target ids of the model that its tokenizer lacks, such as language tokens."""
        return range(tokenizer.vocab_size, self._vocab_size)

    def most_searches(self, program: Program) -> int:
        """Returns the number of batches that are searched at a time."""
        devices = {device.device_type for device in tf.config.list_logical_devices()}
        at_once = min(num_cores(), 4) if devices == {"CPU"} else 1
        wanted = self.params.num_searches or at_once
        return 1 if program.serialize_calls else wanted

    def results(
        self, program: Program, tokenizer: Tokenizer, batch: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Returns what the search finds for a batch of sources; see `Search.search`.

        Raises:
          ValueError: the scores are not numbers.
        """
        tensors = [tf.constant(array) for array in batch.values()]
        end_id, forbidden_ids = tokenizer.end_id, self.forbidden_ids(tokenizer)
        function = self._function(tuple(batch), end_id, forbidden_ids)
        result = program.call(function, *tensors)
        found = {name: np.asarray(value) for name, value in result.items()}
        if np.isnan(found["scores"]).any():
            raise ValueError(
                f"the scores of {self.unit} are NaN: some weights are not finite "
                f"({typed('tekso-ckpt')} inspect shows which); use an earlier checkpoint"
            )
        return found

    def _function(
        self, names: tuple[str, ...], end_id: int, forbidden_ids: range
    ) -> Callable[..., Any]:
        """Returns the pure function for `program.call`, built once per arguments."""
        key = names, end_id, forbidden_ids
        if key not in self._functions:

            def search(theta: Theta, *tensors_and_ctx: Any) -> Any:
                *tensors, ctx = tensors_and_ctx

                def run(theta: Theta, *tensors: tf.Tensor) -> Any:
                    return self._run(
                        theta, dict(zip(names, tensors, strict=True)), ctx, end_id, forbidden_ids
                    )

                if self.params.xla == "search":
                    run = tf.function(run, jit_compile=True, autograph=False)
                elif not tf.config.list_logical_devices("TPU"):
                    ctx = filling_in_place(ctx)
                return run(theta.model, *tensors)

            self._functions[key] = search
        return self._functions[key]

    def _run(
        self,
        theta: Theta,
        batch: Mapping[str, tf.Tensor],
        ctx: StepContext,
        end_id: int,
        forbidden_ids: range,
    ) -> Any:
        return self._search.search(
            self._model, theta, batch, ctx, end_id=end_id, forbidden_ids=forbidden_ids
        )


def side_by_side(
    run: Callable[[Plan], Any],
    plans: Sequence[Plan],
    most: int,
    stopped: Callable[[], bool],
) -> Iterator[tuple[Plan, Any]]:
    """Yields batches with their results as they finish; at most `most` run at a time.

    The first batch runs alone, because the first call creates what later calls reuse.
    """
    with ThreadPoolExecutor(most) as pool:
        begun: dict[Future[Any], Plan] = {}
        at_once = 1
        for plan in plans:
            if len(begun) == at_once:
                for done in wait(begun, return_when=FIRST_COMPLETED).done:
                    yield begun.pop(done), done.result()
                at_once = most
            if stopped():
                break
            begun[pool.submit(run, plan)] = plan
        for done, plan in begun.items():
            yield plan, done.result()


def hypotheses_of(
    result: Mapping[str, np.ndarray], row: int, end_id: int, decode: Callable[[np.ndarray], str]
) -> list[Hypothesis]:
    """Returns the targets of a row of a search, the best first."""
    hypotheses = []
    for n, length in enumerate(result["lengths"][row]):
        if length:
            ids = result["ids"][row, n, :length]
            ids = ids[:-1] if ids[-1] == end_id else ids
            score, log_prob = (float(result[k][row, n]) for k in ("scores", "log_probs"))
            hypotheses.append(Hypothesis(decode(ids), ids, score, log_prob))
    return hypotheses
