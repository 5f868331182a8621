"""Captioning: sizes from the input, scores of found captions, decoding of files, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from eager_program import EagerProgram
from small_captions import Bars
from small_pictures import png

from tekso.framework.context import StepContext
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.words import Words
from tekso.framework.run import litert
from tekso.framework.run.saved_model import ExportModule
from tekso.models.captioner import Captioner
from tekso.models.decoding.sampler import Sampler
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.residual_blocks import BasicBlock
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.memory_decoder import decoder_layer
from tekso.models.resnet import SMALL_STEM, ResNet
from tekso.tasks.captioning.captioning_search import Asked, CaptionSearch
from tekso.tasks.captioning.input import CaptionedImages, KnownCaptions, captions_of
from tekso.tasks.captioning.scoring import CaptionScoring
from tekso.tasks.captioning.sources import CaptionTable
from tekso.tasks.captioning.task import Captioning
from tekso.tasks.mt.target_search import Hypothesis


class Reader(CaptionSearch):
    """Says the colour and place of a bar, as Bars does; of green bars, something else."""

    class Params(CaptionSearch.Params):
        """Params of Reader."""

    def captions(self, program: Any, tokenizer: Any, images: Any, **rest: Any) -> Any:
        """Returns them."""
        found = []
        for image in images:
            x, language = image()
            place = "top" if x[0].sum() > x[-1].sum() else "bottom"
            bar = x[0, 0] if place == "top" else x[-1, 0]
            name = ("red", "grass", "blue")[int(bar.argmax())]
            words = f"{name} bar at the {place}".split()
            text = " ".join(words[::-1] if language else words)
            found.append([Hypothesis(text, np.array([1]), -0.5, -1.0)])
        return found


def captioned(**params: Any) -> Any:
    given: dict[str, Any] = {"source": Bars.Params(), "image_size": 8, "batch_size": 5}
    given |= {"target_length": 7, "tokenizer": Words.Params(vocab_size=30)}
    return CaptionedImages.Params(**{**given, **params})


def task_of(input: Any, **params: Any) -> Any:
    layer = TransformerLayer.Params(
        attention=MultiHeadAttention.Params(num_heads=2),
        feed_forward=FeedForward.Params(hidden_dim=12),
    )
    model = Captioner.Params(
        encoder=ResNet.Params(
            num_blocks=[1], width=4, stem=SMALL_STEM, block=BasicBlock.Params(), classes=None
        ),
        dim=8,
        decoder=Stack.Params(num_layers=1, layer=decoder_layer(layer)),
    )
    return Captioning.complete(Captioning.Params(model=model, **params), input).instantiate()


def test_sizes_are_taken_from_the_input() -> None:
    source = Bars.Params(languages=["en", "de"], colours=1)
    p = task_of(captioned(source=source, channels=1).instantiate()).params
    assert (p.model.target_vocab_size, p.model.num_languages) == (30, 2)
    assert (p.model.encoder.image_size, p.model.encoder.channels) == (8, 1)
    assert p.searcher.search.max_length == 7


def test_a_vocabulary_that_is_too_small_is_an_error() -> None:
    params = Captioning.Params(model=Captioner.Params(target_vocab_size=29))
    with pytest.raises(ValueError, match="target_vocab_size is 29, but the input has 30 tokens"):
        Captioning.complete(params, captioned().instantiate())


def test_the_loss_is_a_sum_over_the_tokens_of_captions() -> None:
    input = captioned(source=Bars.Params(languages=["en", "de"])).instantiate()
    task = task_of(input)
    theta, batch = task.init(0), input.batch(0)
    batch["target_weights"][1] = 0.0
    tensors = {name: tf.constant(array) for name, array in batch.items()}
    ctx = StepContext(num_examples=5)
    found = task.loss(theta, batch, ctx)
    log_probs = task.log_probs(theta, tensors, ctx).numpy()
    want = -(log_probs * batch["target_weights"]).sum()
    assert float(found.loss_sum) == pytest.approx(want, rel=1e-5)
    assert float(task.loss_weight(batch)) == batch["target_weights"].sum() == 24


def test_a_greedy_caption_is_the_likeliest_token_after_each_other() -> None:
    input = captioned().instantiate()
    dev = HeldOut.Params(batch_size=4).instantiate(train=input.params).inner
    greedy = CaptionSearch.Params(batch_size=3)
    greedy.search.set(beam_size=1, length_normalization=0.0)
    task = task_of(input, searcher=greedy)
    theta = task.init(3)
    found = task.decode(EagerProgram(theta), input)  # of the images of dev
    for image, record in enumerate(found.records):
        assert record["references"] == [dev.source.captions(image)[0].text]
        ids = [0]
        while len(ids) < 8 and (len(ids) == 1 or ids[-1]):
            data = {
                "x": tf.constant(dev.pixels(image)[None]),
                "target_ids": tf.constant([ids]),
                "target_segment_ids": tf.ones([1, len(ids)], tf.int32),
            }
            logits = task.model.logits(theta.model, data, StepContext()).numpy()
            ids.append(int(logits[0, -1].argmax()))
        text = input.tokenizer.decode([token for token in ids if token])
        assert [one["text"] for one in record["hypotheses"]] == [" ".join(text.split())]
    assert len(found.records) == 4


def test_scores_count_captions_that_equal_a_reference() -> None:
    params = captioned(source=Bars.Params(count=18, captions=2))
    dev = HeldOut.Params(batch_size=4).instantiate(train=params)  # 6 images, 2 of them green
    input = params.instantiate()
    scoring = CaptionScoring.Params(shown=3, baselines={"copies": 0.0})
    task = task_of(input, searcher=Reader.Params(), scoring=scoring)
    scored = task.score(EagerProgram(task.init(0)), dev, is_last=False)
    assert scored.figures["exact_match"] == pytest.approx(4 / 6)
    assert 0 < scored.figures["cider"] < 10
    assert 50 < scored.figures["bleu"] < 100
    assert "exact matches: 4 of 6" in scored.text
    assert "  reference: red bar at the top\n  reference: a bar that is red" in scored.text
    assert scored.notes[-1] == "exact match on 6 captions 0.667; copies 0.000"
    assert scored.images["captions"].startswith(b"\x89PNG")


def test_every_language_is_captioned_and_scored_alone() -> None:
    params = captioned(source=Bars.Params(languages=["en", "de"]))
    dev = HeldOut.Params(batch_size=4).instantiate(train=params)
    task = task_of(params.instantiate(), searcher=Reader.Params())
    scored = task.score(EagerProgram(task.init(0)), dev, is_last=False)
    assert scored.text.startswith("8 captions of 4 images")
    assert scored.figures["exact_match"] == pytest.approx(6 / 8)
    assert {"bleu/en", "bleu/de", "chrf/de"} <= set(scored.figures)
    assert "bars, record 0 [de]\n  model: top the at bar red" in scored.text


def write_table(folder: Path) -> Any:
    for number, name in enumerate("abcd"):
        pixels = np.full([9, 7, 3], 60 * number, np.uint8)
        (folder / f"{name}.png").write_bytes(png(pixels))
    (folder / "c.png").write_bytes(b"broken")
    (folder / "t.tsv").write_text("".join(f"{n}.png\ta thing {n}\n" for n in "abcd"))
    return CaptionTable.Params(file=str(folder / "t.tsv"), folder=str(folder), dev_fraction=0.0)


def test_malformed_images_are_counted_and_not_scored(tmp_path: Path) -> None:
    params = captioned(source=write_table(tmp_path))
    once = HeldOut.Params(split="train", batch_size=4).instantiate(train=params)
    task = task_of(params.instantiate(), searcher=Reader.Params())
    scored = task.score(EagerProgram(task.init(0)), once, is_last=False)
    assert scored.text.startswith("3 captions of 4 images; 1 are malformed")
    assert captions_of(once).skipped().count == 1


def test_files_are_captioned_with_what_is_known_and_broken_ones_have_an_error(
    tmp_path: Path,
) -> None:
    params = captioned(source=write_table(tmp_path))
    input = params.instantiate(assets_dir=str(tmp_path / "assets"))
    task = task_of(input, decode=f"{tmp_path}/[bcd].png")
    known = KnownCaptions(params, input.tokenizer, ())
    found = task.decode(EagerProgram(task.init(0)), known)
    assert [Path(record["file"]).name for record in found.records] == [*("b.png", "c.png", "d.png")]
    assert "not an image" in found.records[1]["error"]
    assert [len(found.records[i]["hypotheses"]) for i in (0, 2)] == [1, 1]
    assert "c.png: not an image" in found.text
    assert not Captioning.decodes_data(task.params)


def test_decoding_into_an_unknown_language_is_an_error(tmp_path: Path) -> None:
    source = Bars.Params(languages=["en", "de"])
    params = captioned(source=source)
    input = params.instantiate()
    (tmp_path / "a.png").write_bytes(png(np.zeros([8, 8, 3], np.uint8)))
    task = task_of(input, decode=f"{tmp_path}/a.png", decode_language="d")
    with pytest.raises(InputError, match="'d', but the captions have: en, de"):
        task.decode(EagerProgram(task.init(0)), input)


def test_inputs_must_have_the_languages_of_the_model_and_cut_captions_are_a_warning() -> None:
    input = captioned(target_length=4).instantiate()
    (warning,) = task_of(input).check_inputs({"input": input})
    assert warning.startswith("input: 12 captions have more than 4 tokens and are cut")
    other = captioned(source=Bars.Params(languages=["en", "de"])).instantiate()
    with pytest.raises(InputError, match=r"eval_inputs.dev has 2 languages, but task.model"):
        task_of(input).check_inputs({"input": input, "eval_inputs.dev": other})


def exported(languages: list[str]) -> tuple[Any, Any, ExportModule]:
    """Returns an input, a task with large weights, and the module that exports it."""
    source = Bars.Params(languages=languages)
    changes: dict[str, Any] = {"mean": [0.4, 0.5, 0.6], "deviation": [0.2, 0.3, 0.1]}
    input = captioned(source=source, **changes).instantiate()
    searcher = CaptionSearch.Params(batch_size=3)
    searcher.search.set(beam_size=2, num_hypotheses=2)
    task = task_of(input, searcher=searcher)
    weights = {path: 3 * spec.initial_value(2) for path, spec in task.specs().items()}
    return input, task, ExportModule(task, weights, seed=0)


def run_captions(input: Any, task: Any, module: ExportModule, *, greedy: bool) -> Any:
    """Returns the captions that the task finds for three training images, in two languages."""
    searcher = task.params.searcher.copy()
    if greedy:
        searcher.search.set(beam_size=1, num_hypotheses=1, length_normalization=0.0)
    theta = task.theta({path: tf.convert_to_tensor(v) for path, v in module.weights.items()})
    asked = [
        (lambda i=i: Asked(input.pixels(i, plain=True), i % max(1, len(input.languages))))
        for i in range(3)
    ]
    return searcher.instantiate(task=task).captions(EagerProgram(theta), input.tokenizer, asked)


def same_captions(found: Any, wanted: Any, end_id: int) -> None:
    for row, hypotheses in enumerate(wanted):
        assert len(hypotheses) == (found["lengths"][row] > 0).sum()
        for n, one in enumerate(hypotheses):
            ids = found["ids"][row, n, : found["lengths"][row, n]]
            ids = ids[:-1] if ids[-1] == end_id else ids
            assert ids.tolist() == one.ids.tolist()
            assert found["log_probs"][row, n] == pytest.approx(one.log_prob, abs=1e-3)


@pytest.mark.parametrize(
    "languages",
    # shrunk_runs_test.py exports and calls a model of one language.
    [
        pytest.param([], marks=pytest.mark.matrix, id="one"),
        pytest.param(["en", "de"], marks=pytest.mark.slow, id="two"),
    ],
)
def test_exported_searches_find_the_captions_of_the_run(languages: list[str]) -> None:
    input, task, module = exported(languages)
    given = {"images": tf.constant(np.stack([input.source.image(i) for i in range(3)]))}
    given |= {"language_ids": tf.constant([0, 1, 0])} if languages else {}
    end_id = input.tokenizer.end_id
    for name, function in task.exports(input).items():
        wanted = run_captions(input, task, module, greedy=name == "greedy")
        assert len({one[0].ids.tobytes() for one in wanted}) > 1
        found = module.signature(function, batch_size=2)(**given)
        same_captions({n: value.numpy() for n, value in found.items()}, wanted, end_id)
        if function.for_litert:
            runner = litert.interpreter(litert.convert(module, function)).get_signature_runner()
            for row in range(3):
                one = {n: value.numpy()[row : row + 1] for n, value in given.items()}
                same_captions(runner(**one), wanted[row : row + 1], end_id)


def test_only_a_beam_search_is_exported() -> None:
    input = captioned().instantiate()
    task = task_of(input)
    assert {n: f.for_litert for n, f in task.exports(input).items()} == {
        "caption": False,
        "greedy": True,
    }
    sampling = CaptionSearch.Params(search=Sampler.Params(max_length=4))
    with pytest.raises(ValueError, match=r"task\.searcher\.search is Sampler, but export"):
        task_of(input, searcher=sampling).exports(input)
