"""Exports translation of texts to programs without Tekso, with tokenizers in the SavedModel.

    text ─ SentencePiece ─ cut ─ "translate" of exports.py ─ bytes of the tokens ─ text

Export and loading both require the package tensorflow-text. The translations equal those of
`Translator`, because the same tokens are input to the same search.

Legend: B texts, H targets of each, T most tokens of a target, S most tokens of a source.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.exports import ExportedTexts
from tekso.framework.input.sentence_piece import SPACE, SentencePiece
from tekso.framework.input.tokenizers import REPLACEMENT
from tekso.tasks.mt.pair_texts import PairTexts

_BLANK = r"[\s\p{Z}]*"
_PACKAGE = "tensorflow_text"


def text_exports(input: PairTexts, *, longest: int) -> dict[str, ExportedTexts]:
    """Returns text inputs and outputs for "translate" and "greedy".

    Returns {} if tensorflow-text is not installed, or the source tokenizer is not SentencePiece.

    Args:
      input: the tokenizers of both sides.
      longest: most tokens of a source, end included.
    """
    if not isinstance(input.source_tokenizer, SentencePiece):
        return {}
    try:
        package = importlib.import_module(_PACKAGE)
    except ImportError:
        return {}
    reader = _Reader(package, input, longest)
    inputs = {"texts": "texts to translate"}
    if input.languages:
        inputs["languages"] = f"target language of each text: {', '.join(input.languages)}"
    outputs = {
        "texts": "translations, the best first, empty if there is none: [examples, targets]",
        "scores": "scores that rank them, -inf if there is none: [examples, targets]",
    }
    table = [*map(bytes, input.target_tokenizer.token_bytes), REPLACEMENT.encode()]
    return {
        name: ExportedTexts(
            read=reader.read,
            write=lambda found, given: _written(found, given, table),
            inputs=inputs,
            outputs=outputs,
            resources=[reader.tokenizer],
            package=_PACKAGE,
        )
        for name in ("translate", "greedy")
    }


class _Reader:
    """Encodes sources in a graph."""

    def __init__(self, package: Any, input: PairTexts, longest: int) -> None:
        source: Any = input.source_tokenizer
        self.tokenizer = package.SentencepieceTokenizer(source.model)
        self._end_id, self._spelled_space = int(source.end_id), source.encode(SPACE).tolist()
        self._languages, self._first_language = list(input.languages), int(source.vocab_size)
        self._longest = longest

    def read(self, given: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns "source_ids" [B, S] and "source_lengths" [B], int32."""
        ids = self._encoded(given["texts"])
        ids = tf.concat([self._language_ids(given), ids], 1)
        ids = tf.concat([ids[:, : self._longest - 1], self._column(given, self._end_id)], 1)
        return {
            "source_ids": ids.to_tensor(0),
            "source_lengths": tf.cast(ids.row_lengths(), tf.int32),
        }

    def _encoded(self, texts_B: tf.Tensor) -> tf.RaggedTensor:
        """Returns tokens, [B, tokens].

        SentencePiece takes the character U+2581 for a space. Where a text contains it, this inserts
        the tokens of that character.
        """
        parts = tf.strings.split(texts_B, SPACE)
        pieces = self.tokenizer.tokenize(parts.flat_values)
        spelled = tf.tile([self._spelled_space], [pieces.nrows(), 1])
        ids = parts.with_flat_values(tf.concat([pieces, spelled], 1))
        ids = ids.merge_dims(1, 2)
        return ids[:, : -len(self._spelled_space)]

    def _language_ids(self, given: Mapping[str, tf.Tensor]) -> tf.RaggedTensor:
        if not self._languages:
            return tf.RaggedTensor.from_tensor(self._column(given, 0)[:, :0])
        is_one = tf.equal(tf.expand_dims(given["languages"], 1), tf.constant(self._languages))
        known = tf.debugging.assert_equal(
            tf.reduce_any(is_one, 1), True, message=f"languages must be in {self._languages}"
        )
        with tf.control_dependencies([known]):
            ids_B = self._first_language + tf.argmax(is_one, 1, output_type=tf.int32)
        return tf.RaggedTensor.from_tensor(tf.expand_dims(ids_B, 1))

    def _column(self, given: Mapping[str, tf.Tensor], token: int) -> tf.Tensor:
        return tf.fill([tf.shape(given["texts"])[0], 1], token)


def _written(
    found: Mapping[str, tf.Tensor], given: Mapping[str, tf.Tensor], table: list[bytes]
) -> dict[str, tf.Tensor]:
    """Returns texts and scores [B, H] for target ids; a blank source has no translation."""
    ids_BHT, lengths_BH1 = found["ids"], tf.expand_dims(found["lengths"], -1)
    is_token = tf.range(tf.shape(ids_BHT)[2]) < lengths_BH1  # the end token has no bytes
    known_BHT = tf.minimum(ids_BHT, len(table) - 1)  # ids beyond the tokenizer's have no text
    bytes_BHT = tf.where(is_token, tf.gather(tf.constant(table), known_BHT), "")
    texts_BH = tf.strings.reduce_join(bytes_BHT, -1)
    texts_BH = tf.strings.unicode_transcode(texts_BH, "UTF-8", "UTF-8", errors="replace")
    is_blank_B1 = tf.expand_dims(tf.strings.regex_full_match(given["texts"], _BLANK), 1)
    return {
        "texts": tf.where(is_blank_B1, "", texts_BH),
        "scores": tf.where(is_blank_B1, float("-inf"), found["scores"]),
    }
