"""The captioning task: predict a caption, token by token, given the image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tekso.framework import files
from tekso.framework.exports import ExportedFunction
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import spread
from tekso.framework.input.input import Input
from tekso.framework.input.skips import BadRecordError, Origin, reason_of
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.task import Decoded, Program, Scored
from tekso.models.decoding.beam_search import exported_search
from tekso.tasks.captioning.captioning_search import Asked, CaptionSearch, blocks
from tekso.tasks.captioning.exports import caption_exports
from tekso.tasks.captioning.input import KnownCaptions, captions_of, known_captions, language_id
from tekso.tasks.captioning.scoring import CIDER, EXACT, CaptionScoring
from tekso.tasks.image.file_answers import AnswersFiles, FileAnswer
from tekso.tasks.image.image_input import held_out
from tekso.tasks.image.preparation import Preparation
from tekso.tasks.mt.scores import BLEU, CHRF
from tekso.tasks.mt.target_task import TargetTask
from tekso.tasks.unset_sizes import set_sizes, set_vocab_size

_MOST_FILES = 256  # captioned together


class Captioning(AnswersFiles, TargetTask):
    """Minimises the cross-entropy of every token of a caption, including the end token.

    The model is a `Captioner`. Sizes of the model that are not set are taken from the input.
    Evaluations report the perplexity, and from captions that a search finds "bleu" and "chrf" (0 to
    100), "cider" (CIDEr-D, 0 to 10; papers print it times 100) and "exact_match", the share of
    captions that equal one of their references.

    Shapes:
      batch: the arrays of `CaptionedImages`
      loss returns: sums over the weighted labels, scalars
      log_probs returns: [B, T] float32
    """

    class Params(TargetTask.Params):
        """Params of Captioning."""

        model: Layer.Params = param("The network, a Captioner.", default=REQUIRED)
        searcher: CaptionSearch.Params = param(
            "How captions are found.", default=CaptionSearch.Params()
        )
        scoring: CaptionScoring.Params | None = param(
            "Captions and scores in evaluations; None: neither.", default=CaptionScoring.Params()
        )
        decode: str = param(
            "Image files that --mode=decode captions: globs, separated by commas. Empty: images of "
            "the split dev.",
            default="",
        )
        decode_language: str | None = param(
            "Language of these captions, if the model has several; None: the first.", default=None
        )
        num_decoded: int = param("Images that are decoded if no files are given.", default=10)

    goals = {BLEU: "max", CHRF: "max", CIDER: "max", EXACT: "max"}  # noqa: RUF012

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.searcher: CaptionSearch = p.searcher.instantiate(task=self)
        self._scoring: CaptionScoring | None = p.scoring and p.scoring.instantiate()

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Sets vocabulary, languages, image size and the longest caption, where they are not set.

        Raises:
          ValueError: the vocabulary size is set nowhere, or is smaller than the input's.
        """
        params = params.copy()
        model, data = params.model, input.params
        set_vocab_size(model, "target_vocab_size", input.vocab_size, data="captions")
        if "target_length" not in data:  # not of a `CaptionedImages`: the sizes must be set
            return params
        sizes = {
            "num_languages": max(1, len(type(data.source).owner.languages_of(data.source))),
            "encoder.image_size": data.image_size,
            "encoder.channels": data.channels,
            "target_positions.max_length": data.target_length,
        }
        set_sizes(model, sizes)
        if params.searcher.search.max_length is None:
            params.searcher.search.max_length = data.target_length
        return params

    def check_inputs(self, inputs: Mapping[str, Any]) -> list[str]:
        """Checks the kind of the inputs and their languages; warns of captions that are cut.

        Raises:
          InputError: an input has no captions, or has other languages than the model.
        """
        warnings = []
        for path, input in inputs.items():
            own = captions_of(input)
            if max(1, len(own.languages)) != self.params.model.num_languages:
                raise InputError(
                    f"{path} has {max(1, len(own.languages))} languages, but "
                    f"task.model.num_languages is {self.params.model.num_languages}"
                )
            if own.num_cut:
                warnings.append(
                    f"{path}: {own.num_cut:,} captions have more than "
                    f"{own.params.target_length} tokens and are cut (input.target_length)"
                )
        return warnings

    def score(
        self,
        program: Program,
        input: Input,
        *,
        is_last: bool,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Scored | None:
        """Returns scores of captions that are found for an evaluation input; see `Task`."""
        del is_last
        if self._scoring is None:
            return None
        return self._scoring.score(program, self.searcher, captions_of(input), stopped=stopped)

    @classmethod
    def decodes_data(cls, params: Any) -> bool:
        """Returns whether decoding reads images of the input; see Task."""
        return not params.decode

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns captions of image files, or of images of the split dev."""
        if self.params.decode:
            return self.decoded_files(program, input, self.params.decode)
        shown = held_out(captions_of(input))
        own = shown.input
        records, asked = [], []
        for image in spread(len(own.source), self.params.num_decoded).tolist():
            captions, file = own.source.captions(image), own.source.origin(image).file
            record = {"kind": "caption", "file": file, "references": [c.text for c in captions]}
            try:
                x = own.pixels(image, plain=True)
            except BadRecordError as error:
                records.append({**record, "error": error.reason})
                continue
            language = captions[0].language or None
            records.append({**record, "language": language or ""})
            asked.append(Asked(x, language_id(own.languages, language)))
        decoded = self.decoded(self._captioned(program, own.tokenizer, records, asked))
        return Decoded(shown.titled(decoded.text, "images"), decoded.records)

    def file_answers(
        self, program: Program, input: Input | KnownCaptions, paths: Sequence[str]
    ) -> Iterator[FileAnswer]:
        """See `AnswersFiles`.

        Raises:
          InputError: task.decode_language is unknown.
        """
        known = known_captions(input)
        preparation = Preparation(known.params, known.params.evaluate)
        language = language_id(known.languages, self.params.decode_language)
        for part in blocks(paths, _MOST_FILES):
            records, asked = [], []
            for path in part:
                record: dict[str, Any] = {"kind": "caption", "file": path}
                try:
                    image = preparation.image(files.read(path), 0, Origin(path))
                    asked.append(Asked(preparation.normalized(image), language))
                except (BadRecordError, OSError) as error:
                    record["error"] = reason_of(error)
                else:
                    record["language"] = known.languages[language] if known.languages else ""
                records.append(record)
            found = self._captioned(program, known.tokenizer, records, asked)
            yield from map(FileAnswer, found)

    def cells(self, record: Mapping[str, Any]) -> list[tuple[str, ...]]:
        """Returns a row with caption and score for every hypothesis of a record."""
        return [(one["text"], f"{one['score']:.4f}") for one in record["hypotheses"]]

    def line(self, record: Mapping[str, Any]) -> str:
        """See `AnswersFiles`: the file, and a line for each hypothesis and reference."""
        if "error" in record:
            return f"{record['file']}: {record['error']}"
        to = f" [{record['language']}]" if record["language"] else ""
        lines = [f"{record['file']}{to}"]
        lines += [f"  {one['score']:8.3f}  {one['text']}" for one in record["hypotheses"]]
        lines += [f"  reference {text}" for text in record.get("references", ())]
        return "\n".join(lines)

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns functions from pixels to the tokens of captions.

        Raises:
          ValueError: the search is not a beam search.
        """
        search = exported_search(self.params.searcher.search, "task.searcher.search")
        known = known_captions(input)
        forbidden = self.searcher.forbidden_ids(known.tokenizer)
        return caption_exports(self.model, search, known, forbidden_ids=forbidden)

    def _captioned(
        self,
        program: Program,
        tokenizer: Tokenizer,
        records: list[dict[str, Any]],
        asked: list[Asked],
    ) -> list[dict[str, Any]]:
        """Returns the records with the captions of the images that could be read."""
        images = [lambda one=one: one for one in asked]
        captions = iter(self.searcher.captions(program, tokenizer, images) if images else ())
        for record in records:
            if "error" not in record:
                record["hypotheses"] = [one.record() for one in next(captions)]
        return records
