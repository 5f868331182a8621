"""The translation task: predict the target, token by token, given the source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tekso.framework.exports import ExportedFunction, ExportedTexts
from tekso.framework.input.input import Input
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, literals, param
from tekso.framework.task import Decoded, Program, Scored
from tekso.models.decoding.beam_search import exported_search
from tekso.tasks.mt.exports import translation_exports
from tekso.tasks.mt.input import pairs_of
from tekso.tasks.mt.pair_texts import texts_of
from tekso.tasks.mt.scores import BLEU, CHRF
from tekso.tasks.mt.scoring import Scoring
from tekso.tasks.mt.target_task import TargetTask
from tekso.tasks.mt.text_exports import text_exports
from tekso.tasks.mt.translator import Translator, one_line
from tekso.tasks.unset_sizes import set_vocab_size

NUM_EXAMPLES = 3  # pairs that are translated if no texts are given


class Translation(TargetTask):
    """Minimises the cross-entropy of every target token, including the end token.

    Shapes:
      batch:
        "source_ids", "source_segment_ids": [B, S] int32
        "target_ids" (decoder inputs), "target_labels" (to be predicted), "target_segment_ids":
          [B, T] int32; "target_weights": [B, T] float32, 0 for padding
        packed rows also have "source_positions" [B, S] and "target_positions" [B, T], int32
      loss returns: sums over the weighted labels, scalars
      log_probs returns: [B, T] float32
    """

    class Params(TargetTask.Params):
        """Params of Translation."""

        model: Layer.Params = param(
            "The network, a SequenceToSequence. Vocabulary sizes that are not set are taken from "
            "the tokenizers.",
            default=REQUIRED,
        )
        translator: Translator.Params = param(
            "How texts are translated.", default=Translator.Params()
        )
        scoring: Scoring.Params | None = param(
            "Translation and scoring during evaluations; None: neither.",
            default=Scoring.Params(),
        )
        decode: list[str] = param(
            "Texts that --mode=decode translates. Empty list: the first training sources.",
            default=[],
        )
        decode_language: str | None = param(
            "Target language of these texts, if the model has several; None: the first.",
            default=None,
        )

    goals = {BLEU: "max", CHRF: "max"}  # noqa: RUF012

    def __init__(self, params: Any) -> None:
        """Builds the network."""
        super().__init__(params)
        p = self.params
        self.translator: Translator = p.translator.instantiate(task=self)
        self._scoring: Scoring | None = None
        if p.scoring is not None:
            self._scoring = p.scoring.instantiate(task=self, translator=self.translator)

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Sets vocabulary sizes, learned positions and the longest target, where they are not set.

        Raises:
          ValueError: a vocabulary size is set nowhere, or is smaller than the input's; or there
            are too few learned positions.
        """
        params = params.copy()
        for name in ("source_vocab_size", "target_vocab_size"):
            set_vocab_size(params.model, name, _vocab_size(input, name), data="text")
        for side in ("source", "target"):
            length, path = f"{side}_length", f"{side}_positions.max_length"
            if (
                length in input.params
                and path in params.model
                and (params.model.get(path) is REQUIRED)
            ):
                params.model.set({path: input.params.get(length)})
        search, learned = params.translator.search, "target_positions.max_length"
        if search.max_length is None and learned in params.model:
            params.translator.search.max_length = params.model.get(learned)
        _complete_one_sequence(params, input)
        return params

    def score(
        self,
        program: Program,
        input: Input,
        *,
        is_last: bool,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Scored | None:
        """Returns BLEU and chrF of translated pairs, samples, and plots of attention weights."""
        if self._scoring is None:
            return None
        return self._scoring.score(program, pairs_of(input), is_last=is_last, stopped=stopped)

    @classmethod
    def decodes_data(cls, params: Any) -> bool:
        """Returns whether decoding translates pairs of the input; see Task."""
        return not params.decode

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns n-best translations of the texts in the Params, or of the first pairs."""
        p, known = self.params, texts_of(input)
        texts, references = list(p.decode), []
        if not texts:
            pairs = pairs_of(input).pairs(slice(NUM_EXAMPLES))
            texts, references = [pair.source for pair in pairs], [pair.target for pair in pairs]
            languages = [pair.language for pair in pairs]
        else:
            first = known.languages[0] if known.languages else ""
            languages = [p.decode_language or first] * len(texts)
        found = self.translator.translate(program, known, texts, languages=languages)
        records = [
            {
                "kind": "translation",
                "source": text,
                "language": language,
                "hypotheses": [hypothesis.record() for hypothesis in own],
                **({"reference": references[i]} if references else {}),
            }
            for i, (text, language, own) in enumerate(
                zip(texts, languages, found.hypotheses, strict=True)
            )
        ]
        shown = [_shown(record) for record in records]
        if found.num_cut:
            shown.append(
                f"{found.num_cut} texts are longer than the training sources; only their beginning "
                "was translated (task.translator.max_source_length)"
            )
        return Decoded("\n".join(shown), records)

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns functions on tokens that translate, and that score translations.

        Raises:
          ValueError: the search is not a beam search.
        """
        search = exported_search(self.params.translator.search, "task.translator.search")
        known = texts_of(input)
        return translation_exports(
            self,
            search,
            end_id=known.target_tokenizer.end_id,
            forbidden_ids=self.translator.forbidden_ids(known.target_tokenizer),
            longest=self.translator.longest_source(known),
            longest_target=known.params.target_length,
        )

    def text_exports(self, input: Input) -> dict[str, ExportedTexts]:
        """Returns the text inputs and outputs of "translate" and "greedy"; see text_exports.py."""
        known = texts_of(input)
        return text_exports(known, longest=self.translator.longest_source(known))

    def setting_to_try(self, eval_inputs: Mapping[str, Any]) -> str | None:
        """Returns a suggested decode setting: the first source of an evaluation input."""
        for input in eval_inputs.values():
            return f"task.decode={literals.write([pairs_of(input).pairs(slice(1))[0].source])}"
        return None


def _complete_one_sequence(params: Any, input: Input) -> None:
    """Completes Params of a model with learned positions over source and target together."""
    path = "positions.max_length"
    if path not in params.model or "source_length" not in input.params:
        return
    source_length = input.params.source_length
    if params.model.get(path) is REQUIRED:
        params.model.set({path: source_length + input.params.target_length})
    search, learned = params.translator.search, params.model.get(path)
    longest_source = params.translator.max_source_length or source_length
    if learned <= longest_source:
        raise ValueError(
            f"task.model.{path} is {learned}, but sources alone have up to {longest_source} "
            "tokens: set it higher, so that there is room for targets"
        )
    if search.max_length is None:
        search.max_length = learned - longest_source


def _shown(record: Mapping[str, Any]) -> str:
    to = f" [{record['language']}]" if record["language"] else ""
    lines = [f"source{to}: {record['source']}"]
    lines += [f"  {h['score']:8.3f}  {one_line(h['text'])}" for h in record["hypotheses"]]
    if "reference" in record:
        lines.append(f"  reference {record['reference']}")
    return "\n".join(lines)


def _vocab_size(input: Input, name: str) -> int | None:
    """Returns the vocabulary size of an input, also before it has read data; None if unknown."""
    size = getattr(input, name, None)
    if size is None and (
        "source_tokenizer" not in input.params or not input.params.source_tokenizer
    ):
        size = getattr(input, "vocab_size", None)
        if size is not None and "corpus" in input.params:
            corpus = input.params.corpus
            size += len(type(corpus).owner.languages_of(corpus))
    return size
