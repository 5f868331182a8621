"""A subword tokenizer by SentencePiece, configured so that decoding restores every text exactly."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np

from tekso.framework import files
from tekso.framework.commands import typed
from tekso.framework.cores import num_cores
from tekso.framework.input import assets
from tekso.framework.input.errors import InputError
from tekso.framework.input.sources import TrainingText, digest
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.params import param

SPACE = "\u2581"  # SentencePiece's symbol for a space; the character itself is encoded as bytes
_LONGEST_SENTENCE = 1 << 14  # bytes; longer lines are split for learning
_FEWEST_TOKENS = 300  # 256 bytes, two special ids, and a few pieces


class SentencePiece(Tokenizer):
    """Subword pieces of a SentencePiece model, from a file or learned from the training text.

    In a learned model, id 0 is unknown (never used: characters without a piece are encoded as
    bytes), and id 1 is the end of a text. Text is not normalised.
    """

    class Params(Tokenizer.Params):
        """Params of SentencePiece."""

        vocab_size: int = param("Number of ids.", default=8192)
        file: str = param("Model file, as from tekso-vocab; empty: learn a model.", default="")
        model_type: Literal["bpe", "unigram"] = param("Type of a learned model.", default="bpe")
        train_bytes: int = param(
            "Maximum number of bytes to learn from, sampled evenly from all of the text.",
            default=10_000_000,
        )
        character_coverage: float = param(
            "Fraction of all characters in the text that get their own pieces.", default=0.9999
        )

    end_id = 1

    def __init__(
        self,
        params: Any,
        *,
        assets_dir: str | None = None,
        training: TrainingText | None = None,
    ) -> None:
        """Loads the model, or learns it from the training text.

        Raises:
          InputError: the file is not a SentencePiece model, decoding would not restore every text,
            or the model was learned from different text.
        """
        super().__init__(params)
        p = self.params
        model = self._given(assets_dir) if p.file else self._learned(assets_dir, training)
        self._load(model, p.file or "the learned SentencePiece model")

    def _given(self, assets_dir: str | None) -> bytes:
        if assets_dir and not files.exists(self.params.file):
            # Training has copied the model at its start, so the original file may be gone.
            kept = files.join(assets_dir, "sentencepiece.model")
            if files.exists(kept):
                return files.read(kept)
        data = files.read(files.glob([self.params.file], what=self.params.path_of("file"))[0])
        same = TrainingText(lambda: [], lambda: digest([data]), f"the model {self.params.file}")
        return assets.obtain(
            "sentencepiece.model",
            assets_dir=assets_dir,
            settings={},
            training=same,
            make=lambda _: data,
        )

    def _learned(self, assets_dir: str | None, training: TrainingText | None) -> bytes:
        p = self.params
        settings = {
            name: p.get(name)
            for name in ("vocab_size", "model_type", "train_bytes", "character_coverage")
        }
        return assets.obtain(
            "sentencepiece.model",
            assets_dir=assets_dir,
            settings=settings,
            training=training,
            make=lambda texts: learn(texts, **settings),
        )

    def _load(self, model: bytes, name: str) -> None:
        import sentencepiece

        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise InputError(f"{name} is not a SentencePiece model") from error
        size = processor.get_piece_size()
        vocab_size = self.params.vocab_size
        if size > vocab_size:
            raise InputError(
                f"{name} has {size} pieces, more than vocab_size={vocab_size}: set "
                f"{self.params.path_of('vocab_size')}={size}"
            )
        # A model learned from a small text may have fewer pieces: the last ids are then unused.
        table = [_bytes_of(processor, i) for i in range(size)]
        self.token_bytes = table + [b""] * (vocab_size - size)
        self.end_id = processor.eos_id()
        octets = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        if self.end_id < 0 or not all(processor.is_byte(i) for i in octets):
            raise InputError(
                f"{name} has no {'end-of-text piece' if self.end_id < 0 else 'pieces of bytes'}: "
                f"make a model with {typed('tekso-vocab')}, or with eos_id>=0 and "
                "byte_fallback=true"
            )
        self._spelled_space = np.array(octets, np.int32)
        self._processor = processor
        self.keeps_lines_apart = not any(b"\n" in piece and len(piece) > 1 for piece in table)
        self._check(name)

    def _check(self, name: str) -> None:
        sample = " a  b\t\n\r\n  \u2581 \u00e9\ufb01 c "
        if self.decode(self._encode(sample)) != sample:
            raise InputError(
                f"{name} changes text (spaces, line ends or characters): make a model with "
                f"{typed('tekso-vocab')}, or with normalization_rule_name=identity, "
                "remove_extra_whitespaces=false and add_dummy_prefix=false"
            )

    def encode_all(self, texts: Iterable[str]) -> list[np.ndarray]:
        """Returns the ids of each text, with dtype `dtype`; encodes in parallel."""
        texts = list(texts)
        threads = num_cores()
        whole = self._processor.encode(
            [text if SPACE not in text else "" for text in texts], num_threads=threads
        )
        return [
            np.array(ids if SPACE not in text else self._encode(text), self.dtype)
            for text, ids in zip(texts, whole, strict=True)
        ]

    @property
    def num_pieces(self) -> int:
        """Number of pieces in the model, at most vocab_size."""
        size: int = self._processor.get_piece_size()
        return size

    @property
    def model(self) -> bytes:
        """The serialized SentencePiece model, which other programs can read too."""
        data: bytes = self._processor.serialized_model_proto()
        return data

    def fingerprint(self) -> str:
        """Returns a digest of the model."""
        return digest([self.model, str(self.vocab_size).encode()])

    def _encode(self, text: str) -> np.ndarray:
        ids: list[np.ndarray] = []
        for part in text.split(SPACE):
            ids += [np.array(self._processor.encode(part), np.int32), self._spelled_space]
        return np.concatenate(ids[:-1])


def _bytes_of(processor: Any, index: int) -> bytes:
    if processor.is_control(index) or processor.is_unused(index):
        return b""
    piece: str = processor.id_to_piece(index)
    if processor.is_byte(index):
        return bytes([int(piece[3:5], 16)])
    return "\ufffd".encode() if processor.is_unknown(index) else piece.replace(SPACE, " ").encode()


def learn(
    texts: Iterable[str],
    *,
    vocab_size: int,
    model_type: str = "bpe",
    train_bytes: int = 10_000_000,
    character_coverage: float = 0.9999,
) -> bytes:
    """Learns a model from texts; the same texts and settings give the same bytes.

    Raises:
      InputError: the text is too small, or the vocabulary is.
    """
    import sentencepiece

    if vocab_size < _FEWEST_TOKENS:
        raise InputError(
            f"vocab_size is {vocab_size}, but SentencePiece needs at least {_FEWEST_TOKENS}: 256 "
            "ids are single bytes. For a smaller vocabulary, use Characters or Bytes."
        )
    if not 0.0 < character_coverage <= 1.0 or train_bytes < 1:
        raise InputError(
            f"character_coverage is {character_coverage} and train_bytes {train_bytes}, but must "
            "be in (0, 1] and at least 1"
        )
    sentences = _sample(texts, train_bytes)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            model_type=model_type,
            character_coverage=character_coverage,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=_LONGEST_SENTENCE,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            num_threads=1,  # the same model on every machine
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2] or str(error)
        raise InputError(
            f"SentencePiece cannot learn {vocab_size} pieces from {len(sentences)} lines: {reason}"
        ) from error
    return model.getvalue()


def _sample(texts: Iterable[str], num_bytes: int) -> list[str]:
    """Returns lines of at most `num_bytes` bytes in total, sampled evenly from all of the text.

    Whenever there are too many bytes, every other line is dropped. So one pass is enough, and only
    the sample is kept.
    """
    kept: list[str] = []
    size, stride = 0, 1
    for index, line in enumerate(_lines(texts)):
        if index % stride == 0:
            kept.append(line)
            size += len(line.encode())
            while size > num_bytes and len(kept) > 1:
                kept = kept[::2]
                stride *= 2
                size = sum(len(one.encode()) for one in kept)
    return kept


def _lines(texts: Iterable[str]) -> Iterator[str]:
    longest = _LONGEST_SENTENCE // 4  # a character has at most 4 bytes
    for text in texts:
        for line in text.replace(SPACE, "").removesuffix("\n").split("\n"):
            for begin in range(0, len(line), longest):
                yield line[begin : begin + longest]
