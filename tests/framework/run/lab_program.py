"""What a notebook does with a Lab; prints what came out, as JSON.

lab_program.py FOLDER    FOLDER/text has a text
"""

import contextlib
import io
import json
import sys

from tekso.framework.run.lab import Lab


def main(folder: str) -> None:
    settings = {
        "input.files": f"{folder}/text/*.txt",
        "input.batch_size": 4,
        "*.num_layers": 1,
        "run.steps": 6,
        "task.decode.max_new_tokens": 4,
        "execution.xla": "none",
    }
    lab = Lab("lm.text_files.Bytes", set=settings)
    found: dict[str, object] = {"params": lab.params._repr_html_(), "model": repr(lab.model())}
    found["before"] = repr(lab.plot())
    found["fit"] = repr(lab.fit(3))
    found["more"] = repr(lab.fit(2))
    found["evaluated"] = lab.evaluate(max_batches=1)
    found["plot"] = lab.plot()._repr_png_()[:8].hex()  # type: ignore[index]
    found["sample"] = repr(lab.sample())
    lab.session.task.decode = lambda program, input: None  # type: ignore[method-assign]
    try:
        lab.sample()
    except ValueError as error:
        found["nothing"] = str(error)
    found["records"] = [(record["step"], record["split"]) for record in lab.records]
    found["history"] = [figures["loss"] for figures in lab.session.history]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        lab.fit(4)
    found["rest"] = [lab.session.step, printed.getvalue().splitlines()[0]]
    for name, steps in {"end": 2, "half": 1.5, "text": "3"}.items():
        try:
            lab.fit(steps)  # type: ignore[arg-type]
        except ValueError as error:
            found[name] = str(error)
    print(json.dumps(found))


main(sys.argv[1])
