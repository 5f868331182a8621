"""The text of Params: lossless both ways, without evaluating anything."""

from __future__ import annotations

import enum
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.framework.params import REQUIRED, Configurable, Params, arguments, param, references


class Color(enum.Enum):
    RED = 1
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Leaf(Configurable):
    class Params(Configurable.Params):
        """Params of Leaf."""

        x: Any = param("A value.", default=None)


class OtherLeaf(Leaf):
    pass


class Special(Leaf.Params):
    """Params without an owner of their own."""

    y: int = param("A number.", default=1)


class Node(Configurable):
    class Params(Configurable.Params):
        """Params of Node."""

        size: int = param("Size.", default=REQUIRED)
        rate: float = param("Rate.", default=0.5)
        leaf: Leaf.Params = param("Leaf.", default=Leaf.Params(x=7))
        leaves: list[Leaf.Params] = param("Leaves.", default=[])
        table: dict[Any, Any] = param("Anything by anything.", default={})
        below: Node.Params | None = param("Subtree.", default=None)


def scaled(x: int, *, factor: float = 2.0) -> float:
    return x * factor


_atoms = st.deferred(  # the repr of a deferred strategy stays short
    lambda: (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.binary()
        | st.sampled_from([Color.RED, Color.GREEN, Level.LOW, Mode.READ | Mode.WRITE, Mode(0)])
        | st.sampled_from([REQUIRED, ..., Leaf, OtherLeaf, int, type(None)])
    )
)
_hashable = st.deferred(lambda: _hashable_values)
_values = st.deferred(lambda: _all_values)
_hashable_values = st.recursive(
    # two nans are two keys of a dict, and one when they are read: no text could tell
    _atoms.filter(lambda value: value is not REQUIRED and "nan" not in repr(value)),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
_all_values = st.recursive(
    _atoms
    | st.builds(lambda x: Leaf.Params(x=x), _atoms)
    | st.builds(lambda y: Special(y=y), st.integers()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(_hashable, inner, max_size=3)
        | st.sets(_hashable, max_size=3)
        | st.builds(lambda x: OtherLeaf.Params(x=x), inner)
    ),
    max_leaves=10,
)


def round_trip(params: Any) -> Any:
    text = params.to_text()
    read = Params.from_text(text)
    assert read.to_text() == text
    assert read == params
    assert params.diff(read) == ""
    assert type(read) is type(params)
    return read


@settings(max_examples=200)
@given(_values, st.floats(), st.integers())
def test_every_value_survives_the_round_trip(value: Any, rate: float, size: int) -> None:
    read = round_trip(Node.Params(leaf=Leaf.Params(x=value), rate=rate, size=size))
    assert math.copysign(1, read.rate) == math.copysign(1, rate) or math.isnan(rate)


@settings(max_examples=100)
@given(st.dictionaries(_hashable, _values, max_size=4), st.lists(_values, max_size=3))
def test_every_container_with_params_survives_the_round_trip(table: dict, values: list) -> None:
    round_trip(Node.Params(table=table, leaves=[Leaf.Params(x=value) for value in values]))


@settings(max_examples=200)
@given(st.text(alphabet="ab: \".[](){}\\'\n#,=-1*", max_size=30))
def test_any_text_gives_params_or_a_value_error(text: str) -> None:
    start = Node.Params(size=3).to_text()
    for candidate in (text, start + text, start + "leaf.x : " + text):
        try:
            read = Params.from_text(candidate)
        except ValueError:
            continue
        assert isinstance(read, Node.Params)


def test_the_text_has_one_line_a_leaf_and_a_child() -> None:
    params = Node.Params(leaves=[OtherLeaf.Params(x="a\nb")], table={"a.b": Leaf.Params(x=-0.0)})
    module = __name__
    assert params.to_text() == (
        f'. : Params("{module}:Node")\n'
        "size : REQUIRED\n"
        "rate : 0.5\n"
        f'leaf : Params("{module}:Leaf")\n'
        "leaf.x : 7\n"
        f'leaves : [Params("{module}:OtherLeaf")]\n'
        'leaves.0.x : "a\\nb"\n'
        f'table : {{"a.b": Params("{module}:Leaf")}}\n'
        'table["a.b"].x : -0.0\n'
        "below : None\n"
    )


def test_a_tensorflow_dtype_survives_the_round_trip() -> None:
    tf = pytest.importorskip("tensorflow", reason="the text of its dtypes is tested")
    for dtype in (tf.float32, tf.bfloat16, tf.string):
        params = Leaf.Params(x=[dtype])
        assert params.to_text().splitlines()[1] == f'x : [tf_dtype("{dtype.name}")]'
        assert round_trip(params).x[0] is dtype


def test_params_import_no_tensorflow() -> None:
    code = (
        "import sys, tekso.framework.params as p, tekso.framework.params.text;"
        "p.Params.from_text(p.Configurable.Params().to_text());"
        "import tekso.framework.registry;"
        "assert 'tensorflow' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_default_that_is_not_in_the_text_stays() -> None:
    text = f'# header\n\n. : Params("{__name__}:Node")\r\n  rate : 0.25   # comment\n'
    params = Params.from_text(text)
    assert params.rate == 0.25 and params.leaf.x == 7 and params.size is REQUIRED


def test_what_was_read_has_the_origin_checkpoint_unless_it_is_default() -> None:
    read = Params.from_text(Node.Params(size=3, leaf=OtherLeaf.Params(x=1)).to_text())
    assert read.origin("size") == read.origin("leaf") == read.origin("leaf.x") == "checkpoint"
    assert read.origin("rate") == "default"
    read = Params.from_text(Node.Params(size=3).to_text(), origin="params.txt")
    assert read.origin("size") == "params.txt" and read.origin("leaf.x") == "default"


def test_origins_are_written_as_comments_that_read_back() -> None:
    params = Node.Params(size=3).set_text("rate", "0.25")
    text = params.to_text(origins=True)
    assert "rate : 0.25  # --set\n" in text and "text_test.py:" in text
    assert Params.from_text(text) == params


def test_frozen_params_have_the_same_text() -> None:
    params = Node.Params(table={"a": [{1}, {"b": ()}]})
    assert params.copy().freeze().to_text() == params.to_text()


def test_a_subclass_of_from_text_refuses_other_params() -> None:
    with pytest.raises(TypeError, match=r"must describe Node.Params, given Leaf.Params"):
        Node.Params.from_text(Leaf.Params().to_text())


@pytest.mark.parametrize(
    "literal",
    [
        "__import__('os').system('true')",
        "open('x')",
        "(lambda: 1)()",
        "1 + 1",
        "[x for x in 'ab']",
        "f'{1}'",
        r"'\*' + 1",
        "print",
        "os.sep",
        "set([1])",
        "frozenset([1])",
        "{**{}}",
        "[*[]]",
        "{[]: 1}",
        "{[]}",
        "not True",
        "1 if True else 2",
        "1if True else 2",
        "Params()",
        "Params(3)",
        "Params('os:system')",
        "cls('os:system')",
        "cls('pathlib:Path')",
        "cls('builtins:eval')",
        "function('os:system')",
        f"cls('{__name__}:Leaf', '{__name__}')",
        "enum('os:system', 'x')",
        f"enum('{__name__}:Color')",
        "define(1, int, 'A field.')",
        "np_dtype('float32')",
        "complex(1.0, 2.0)",
        "2j",
        "(" * 300 + ")" * 300,
        "",
    ],
)
def test_what_is_no_literal_is_refused(literal: str, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(ValueError, match="line 2"):
        Params.from_text(f'. : Params("{__name__}:Leaf")\nx : {literal}')
    assert not recwarn.list


def test_reading_calls_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap_for_params.py").write_text(
        "called = []\n"
        "class Meta(type):\n"
        "    def __getattr__(cls, name):\n"
        "        called.append(name)\n"
        "class Trap(metaclass=Meta):\n"
        "    def __new__(cls, *args):\n"
        "        called.append('new')\n"
        "def function(*args):\n"
        "    called.append('function')\n"
        "def __getattr__(name):\n"
        "    called.append(name)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import trap_for_params  # type: ignore[import-not-found]

    for name in ("Trap", "Trap.x", "function", "nothing"):
        for kind in ("Params", "cls", "function", "enum"):
            reference = f'{kind}("trap_for_params:{name}")'
            with pytest.raises(ValueError, match="trap_for_params"):
                Params.from_text(f'. : Params("{__name__}:Leaf")\nx : {reference}')
    assert trap_for_params.called == []


def test_a_text_imports_only_modules_that_the_user_has_named(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stranger", "named", "typed", "stranger_named"):
        (tmp_path / f"params_text_{name}.py").write_text(
            "from tekso.framework.params import Configurable\nclass Mine(Configurable): pass\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(references, "_ALLOWED", set())
    below = f'. : Params("{__name__}:Node")\nleaf : '
    for reference in ("params_text_stranger:Mine", "antigravity:X", "tekso_framework:X"):
        for text in (f'. : Params("{reference}")', f'{below}Params("{reference}")',
                     f'{below}[cls("{reference}")]'):  # fmt: skip
            with pytest.raises(ValueError, match="is not imported, and a text imports only"):
                Params.from_text(text)
    assert "params_text_stranger" not in sys.modules and "antigravity" not in sys.modules
    references.allow_imports("params_text_named")
    Params.from_text('. : Params("params_text_named:Mine")')
    with pytest.raises(ValueError, match="is not imported"):
        Params.from_text('. : Params("params_text_stranger_named:Mine")')
    arguments.parse(Params | None, "params_text_typed:Mine")
    Params.from_text('. : Params("params_text_typed:Mine")')


def test_only_modules_of_owners_are_imported(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("owner", "bystander"):
        (tmp_path / f"params_text_{name}.py").write_text(
            "import enum\n"
            "from tekso.framework.params import Configurable\n"
            "class Mine(Configurable): pass\n"
            "class Kind(enum.Enum):\n    A = 1\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    references.allow_imports("params_text_owner")
    references.allow_imports("params_text_bystander")
    with pytest.raises(ValueError, match="params_text_bystander is not imported"):
        Params.from_text(
            f'. : Params("{__name__}:Leaf")\nx : enum("params_text_bystander:Kind", "A")'
        )
    assert "params_text_bystander" not in sys.modules
    read = Params.from_text('. : Params("params_text_owner:Mine")')
    assert "params_text_owner" in sys.modules and type(read).__qualname__ == "Mine.Params"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the text is empty"),
        ("rate : 0.5", "the first line"),
        (". : 3", "is not Params"),
        ('. : Params("no_such_stranger:Leaf")', "module no_such_stranger is not imported"),
        ('. : Params("tekso.models.none:Leaf")', r"there is no module tekso\.models\.none"),
        ('. : Params("os:Leaf")', "os has no Leaf"),
        ('. : Params("os.path:join")', "no Params of its own"),
        ('. : Params("Leaf")', 'expected "module:Class"'),
        (". : Params('NAME:Node')\nrate 0.5", "line 2.*path : literal"),
        (". : Params('NAME:Node')\nrat : 0.5", "did you mean rate?"),
        (". : Params('NAME:Node')\n\nleaf.y : 0.5", "line 3.*leaf.y"),
        (". : Params('NAME:Node')\nrate : 'x'", "rate: must be float, given str 'x'"),
        (". : Params('NAME:Node')\nbelow.rate : 1.0", "below is not Params"),
    ],
)
def test_errors_name_the_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Params.from_text(text.replace("NAME", __name__))


def test_a_module_that_fails_to_import_surfaces_as_it_is(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "params_text_broken.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    references.allow_imports("params_text_broken")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        Params.from_text('. : Params("params_text_broken:Leaf")')


def test_a_class_in_a_function_is_refused_when_it_is_read() -> None:
    class Local(Leaf):
        pass

    text = Local.Params().to_text()
    with pytest.raises(ValueError, match="defined in a function"):
        Params.from_text(text)


def test_a_value_without_text_names_its_path() -> None:
    params = Node.Params(leaf=Leaf.Params())
    for value in (scaled, object(), np.zeros(2), np.float32(1), 1j, pytest, lambda: 1, Path):
        params.leaf.x = value
        with pytest.raises(TypeError, match=r"leaf\.x: .* no text form"):
            params.to_text()
        assert "leaf.x" in Node.Params().diff(params)  # a difference can always be shown


@pytest.mark.parametrize(
    ("value", "name"), [(scaled, "the function scaled"), (Path, "the class Path")]
)
def test_a_function_or_class_without_text_says_what_to_write(value: Any, name: str) -> None:
    said = f"^leaf.x: {name} has no text form: use a class with Params instead, name it by a "
    with pytest.raises(TypeError, match=said):
        Node.Params(leaf=Leaf.Params(x=value)).to_text()


def test_a_class_that_is_not_imported_has_an_advice() -> None:
    with pytest.raises(ValueError, match=r"line 1, .* is not imported") as caught:
        Params.from_text('. : Params("my_digits.parts:Mine")')
    assert references.import_advice(caught.value) == (
        "the module of my_digits.parts:Mine is not imported: add --import=my_digits (in Python: "
        "import my_digits) if you trust it"
    )
    assert references.import_advice(ValueError("another")) == ""
