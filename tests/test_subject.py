"""How a specification becomes a subject: conventions, hooks, functions, shapes, errors."""

from __future__ import annotations

import pytest
import torch

from subclass_testkit import Subject, SubjectError
from subclass_testkit.resolve import complete, resolve
from tests.zoo.correct.lossless import Lossless
from tests.zoo.correct.packed_int4 import PackedInt4
from tests.zoo.correct.row_int8 import RowInt8

ready = Subject(RowInt8, make=RowInt8.from_hp, dtypes=(torch.float32,))


def make_ready() -> Subject:
    return ready


class Hooked(RowInt8):
    @classmethod
    def __subclass_testkit__(cls) -> Subject:
        return Subject(cls, make=lambda hp: Hooked.from_hp(hp), claims=["inference"], dtypes=(torch.bfloat16,))


class OnlyGroups32(RowInt8):
    @classmethod
    def from_hp(cls, hp):
        if hp.shape[-1] % 64:
            raise ValueError("columns must be a multiple of 64")
        return super().from_hp(hp)


@pytest.mark.parametrize("spec", ["tests.test_subject:ready", "tests.test_subject.ready", "tests.test_subject:make_ready"])
def test_a_subject_or_a_function_that_returns_one_is_taken_as_it_is(spec: str) -> None:
    subject = resolve(spec)
    assert subject.cls is RowInt8
    assert subject.dtypes == (torch.float32,)


def test_conventions_find_builder_reader_shapes_and_dtypes() -> None:
    subject = resolve("tests.zoo.correct.row_int8:RowInt8")
    assert subject.make == "RowInt8.from_hp(hp)"
    assert subject.to_plain == "t.dequantize()"
    assert subject.shapes is not None
    assert subject.shapes[:3] == ((32, 48), (48, 48), (33, 17))
    assert subject.dtypes == (torch.float32, torch.bfloat16, torch.float16)
    assert any(line.startswith("make: RowInt8.from_hp(hp)") for line in subject.inferred)


def test_a_hook_on_the_class_comes_before_conventions() -> None:
    subject = resolve(Hooked)
    assert subject.declared == {"inference"}
    assert subject.dtypes == (torch.bfloat16,)
    assert "subject: __subclass_testkit__ of the class" in subject.inferred


def test_the_shape_ladder_finds_a_blocked_format_two_blocks_wide() -> None:
    subject = resolve(OnlyGroups32)
    assert subject.shapes is not None
    assert subject.shapes[0] == (32, 128)
    assert (33, 17) not in subject.shapes


def test_a_one_argument_constructor_and_the_plain_class_are_conventions_too() -> None:
    from torch.testing._internal.subclasses import WrapperSubclass

    bare = complete(Subject(WrapperSubclass))
    assert bare.make == "WrapperSubclass(hp)"
    assert bare.to_plain == "getattr(t, t.__tensor_flatten__()[0][0])"
    trivial = complete(Subject(torch.Tensor))
    assert trivial.make == "hp.as_subclass(Tensor)"
    assert trivial.to_plain == "t.as_subclass(torch.Tensor)"


def test_variants_get_recipes_and_shapes_of_their_own() -> None:
    subject = complete(
        Subject(RowInt8, make=RowInt8.from_hp, variants={"wide": {"make": OnlyGroups32.from_hp, "cls": OnlyGroups32}})
    )
    assert subject.variant_names() == ("default", "wide")
    assert subject.at("wide").shapes[0] == (32, 128)


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"claims": ["trainig"]}, ValueError, "did you mean 'training'"),
        ({"variants": {"v": {"mkae": None}}}, ValueError, "did you mean 'make'"),
    ],
)
def test_a_wrong_field_is_an_error_that_names_the_right_one(fields: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        Subject(RowInt8, **fields)


def test_a_class_that_is_no_tensor_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="subclass of torch.Tensor"):
        Subject(int)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("tests.zoo.correct.row_int8:RowInt9", "did you mean 'RowInt8'"),
        ("tests.zoo.corect.row_int8:RowInt8", "has no 'corect'; did you mean 'correct'"),
        ("no_such_package.Thing", "there is no module 'no_such_package'"),
        ("tests.test_subject:torch", "is neither a subclass of torch.Tensor"),
        ("os.getcwd", "returned str, not a Subject"),
    ],
)
def test_a_specification_that_leads_nowhere_says_so(spec: str, text: str) -> None:
    with pytest.raises(SubjectError, match=text):
        resolve(spec)


def test_make_and_to_plain_are_spelled_for_a_standalone_script() -> None:
    subject = Subject(PackedInt4, make=PackedInt4.from_hp, to_plain=PackedInt4.dequantize)
    assert subject.make_text == "PackedInt4.from_hp(hp)"
    assert "from tests.zoo.correct.packed_int4 import PackedInt4" in subject.import_lines
    by_lambda = Subject(Lossless, make=lambda hp: Lossless.from_hp(hp), to_plain="t.dequantize()")
    assert by_lambda.import_lines[-1] == "make = lambda hp: Lossless.from_hp(hp)"
    script = "\n".join(["import torch", *by_lambda.import_lines, "hp = torch.ones(2, 3)", f"w = {by_lambda.make_text}"])
    names: dict = {}
    exec(script, names)
    assert type(names["w"]) is Lossless


class NoConstructor(torch.Tensor):
    """A subclass as small as can be: made by as_subclass only."""


def test_a_class_without_a_constructor_of_its_own_is_made_in_every_dtype() -> None:
    subject = complete(Subject(NoConstructor))
    assert subject.make == "hp.as_subclass(NoConstructor)"
    assert subject.dtypes == (torch.float32, torch.bfloat16, torch.float16)


def test_recipes_that_are_methods_of_a_class_in_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's or a notebook's class, and one inside another: the name at the root of the recipe is what it stands for."""
    import sys
    import types

    script = types.ModuleType("__main__")

    class Holder:
        class Inner(torch.Tensor):
            @classmethod
            def wrap(cls, hp: torch.Tensor) -> torch.Tensor:
                return hp.as_subclass(cls)

            def unwrap(self) -> torch.Tensor:
                return self.as_subclass(torch.Tensor)

    inner = Holder.Inner
    for named, qualname in ((Holder, "Holder"), (inner, "Holder.Inner"), (inner.unwrap, "Holder.Inner.unwrap")):
        named.__module__, named.__qualname__ = "__main__", qualname
    script.Holder = Holder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", script)
    subject = Subject(inner, make=inner.wrap, to_plain=inner.unwrap)
    assert subject.make_text == "Holder.Inner.wrap(hp)"
    assert subject.to_plain_text == "Holder.Inner.unwrap(t)"
    assert subject.plain(subject.build(torch.ones(2))).tolist() == [1.0, 1.0]
