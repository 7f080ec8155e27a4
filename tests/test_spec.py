from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar, Optional

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.spec import Call, Registry, Spec, format_value, parameter, parse, split_outside, summary

tools: Registry[Tool] = Registry("tool")


@dataclass(frozen=True)
class Tool(Spec):
    """What tools share."""


@tools.register("hammer")
@dataclass(frozen=True)
class Hammer(Tool):
    """Hits things
    on the head.

    More about it.
    """

    weight: float = parameter(1.0, "How heavy.", above=0, high=10)
    blows: int = parameter(3, "How often.", low=1)
    loud: bool = parameter(False, "Whether it is heard.")
    style: str = parameter("plain", "How it looks.", choices=("plain", "claw"))
    owner: str | None = parameter(None, "Who has it.")
    share: float | None = parameter(None, "The part used.", low=0, below=1)


@tools.register("hand-saw")
@dataclass(frozen=True)
class Saw(Tool):
    """Cuts."""


# Reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("a", (Call("a"),)),
        ("  a ( ) ", (Call("a"),)),
        ("a:0.1", (Call("a", (0.1,)),)),
        ("a:1,b", (Call("a", (1, "b")),)),
        ("a(1, 2.5, x)", (Call("a", (1, 2.5, "x")),)),
        ("a(1, low-rank=TRUE, other=None)", (Call("a", (1,), (("low_rank", True), ("other", None))),)),
        ("a(x=-1e-3)+b:2+c.d-e", (Call("a", (), (("x", -0.001),)), Call("b", (2,)), Call("c.d-e"))),
        ("a(x='1+1, (or) so')", (Call("a", (), (("x", "1+1, (or) so"),)),)),
        ("a(x=\"it's\", y='a=b')", (Call("a", (), (("x", "it's"), ("y", "a=b"))),)),
        ("a('b=c')", (Call("a", ("b=c",)),)),
        ("a(x='it''s')", (Call("a", (), (("x", "it's"),)),)),
        ("a(x='')", (Call("a", (), (("x", ""),)),)),
        ("a(x='1')", (Call("a", (), (("x", "1"),)),)),
        ("a(x=(1, (2, 3)))", (Call("a", (), (("x", "(1, (2, 3))"),)),)),
        ("a(x=1e+3)", (Call("a", (), (("x", 1000.0),)),)),
    ],
)
def test_parse(text, calls):
    assert parse(text) == calls


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a name is missing"),
        ("a+", "a name is missing"),
        ("a++b", "a name is missing"),
        ("1a", "must begin with a letter"),
        ("(x=1)", "must begin with a letter"),
        ("a(x=1", "unmatched parenthesis"),
        ("a)x=1(", "unmatched parenthesis"),
        ("a(1)(2)", "unmatched parenthesis"),
        ("a(x='b)", "unmatched quote"),
        ("a b", "after 'a' comes"),
        ("a(1)b", "after 'a' comes"),
        ("a=1", "after 'a' comes"),
        ("a(x=1, 2)", "'2' has no name but follows"),
        ("a(1,,2)", "a value is missing beside a comma"),
        ("a(1,)", "a value is missing beside a comma"),
    ],
)
def test_parse_refuses_in_a_sentence(text, reason):
    with pytest.raises(FedStrataError, match=reason.replace("(", r"\(")):
        parse(text)


def test_split_outside_quotes_and_parentheses():
    assert split_outside("a(1,2),b='x,y',c", ",") == ["a(1,2)", "b='x,y'", "c"]
    assert split_outside("", ",") == [""]
    with pytest.raises(FedStrataError, match="unmatched"):
        split_outside("a),(b", ",")


texts = st.text("ab1.'\"(),=+: ") | st.text()
values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts)
names = st.from_regex(r"[A-Za-z][A-Za-z0-9_.]{0,8}", fullmatch=True)


@given(names, st.lists(st.tuples(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), values), max_size=4))
def test_what_is_written_is_read_back(name, keywords):
    text = f"{name}({', '.join(f'{key}={format_value(value)}' for key, value in keywords)})"
    (call,) = parse(text)
    assert call == Call(name, (), tuple(keywords))
    assert [type(value) for _, value in call.keywords] == [type(value) for _, value in keywords]


@given(st.lists(st.tuples(names, st.lists(values, max_size=3)), min_size=1, max_size=3))
def test_positional_values_and_sums_are_read_back(parts):
    text = " + ".join(f"{name}({', '.join(map(format_value, items))})" for name, items in parts)
    assert parse(text) == tuple(Call(name, tuple(items)) for name, items in parts)


@given(texts)
def test_any_text_is_read_or_refused(text):
    try:
        calls = parse(text)
    except FedStrataError:
        return
    assert all(call.name for call in calls)


@given(
    weight=st.floats(0, 10, exclude_min=True),
    blows=st.integers(1),
    loud=st.booleans(),
    style=st.sampled_from(["plain", "claw"]),
    owner=st.none() | texts,
    share=st.none() | st.floats(0, 1, exclude_max=True),
)
def test_a_component_is_its_text(**chosen):
    tool = Hammer(**chosen)
    assert tools.make(str(tool)) == tool


def test_text_is_as_short_as_possible():
    assert str(Hammer()) == "hammer"
    assert str(Hammer(2, loud=True, owner="Ann B.")) == "hammer(weight=2.0, loud=true, owner='Ann B.')"
    assert str(Hammer(owner="none")) == "hammer(owner='none')"
    assert str(Hammer(owner="12")) == "hammer(owner='12')"


# Checking ------------------------------------------------------------------------------------------------------------


def test_a_whole_number_serves_as_a_number():
    tool = Hammer(weight=2, share=0)
    assert (type(tool.weight), type(tool.share)) == (float, float)
    assert tools.make("hammer:2") == tool.__class__(weight=2.0)


@pytest.mark.parametrize(
    ("given", "expected"), [(np.float64(0.5), 0.5), (np.float32(0.5), 0.5), (np.int64(2), 2.0)], ids=str
)
def test_numbers_of_numpy_become_plain(given, expected):
    tool = Hammer(weight=given)
    assert tool.weight == expected
    assert type(tool.weight) is float
    assert type(Hammer(blows=np.int32(2)).blows) is int


@pytest.mark.parametrize(
    ("field", "value", "admitted"),
    [
        ("weight", 0.0, "more than 0 and at most 10"),
        ("weight", 10.5, "more than 0 and at most 10"),
        ("blows", 0, "at least 1"),
        ("share", 1.0, "at least 0 and less than 1"),
        ("share", -0.1, "at least 0 and less than 1"),
    ],
)
def test_a_value_out_of_range_is_refused_in_a_sentence(field, value, admitted):
    with pytest.raises(FedStrataError) as caught:
        Hammer(**{field: value})
    assert (
        str(caught.value) == f"{value} is outside what the parameter '{field}' of the tool 'hammer' takes: {admitted}."
    )


@pytest.mark.parametrize(
    ("field", "value", "shown", "admitted"),
    [
        ("weight", float("nan"), "nan", "a finite number"),
        ("weight", float("inf"), "inf", "a finite number"),
        ("weight", 10**400, "inf", "a finite number"),
        ("weight", "heavy", "'heavy'", "a number"),
        ("weight", True, "'True'", "a number"),
        ("weight", None, "'None'", "a number"),
        ("blows", 1.0, "'1.0'", "a whole number"),
        ("blows", True, "'True'", "a whole number"),
        ("loud", 1, "'1'", "true or false"),
        ("loud", "yes", "'yes'", "true or false"),
        ("owner", 3, "'3'", "a word or none"),
        ("share", "x", "'x'", "a number or none"),
    ],
    ids=repr,
)
def test_a_value_of_the_wrong_kind_is_refused_in_a_sentence(field, value, shown, admitted):
    with pytest.raises(FedStrataError) as caught:
        Hammer(**{field: value})
    assert (
        str(caught.value) == f"{shown} does not fit the parameter '{field}' of the tool 'hammer': it takes {admitted}."
    )


def test_infinity_fits_where_it_is_admitted():
    @dataclass(frozen=True)
    class Rope(Spec):
        name: ClassVar[str] = "rope"
        kind: ClassVar[str] = "tool"
        length: float = parameter(1.0, "How long it is.", above=0, finite=False)

    assert Rope(length=float("inf")).length == float("inf")
    assert str(Rope(length=float("inf"))) == "rope(length=inf)"
    for value, reason in ((float("nan"), "it takes a number"), (float("-inf"), "more than 0")):
        with pytest.raises(FedStrataError, match=reason):
            Rope(length=value)


def test_a_value_that_is_no_choice_is_answered_with_the_nearest():
    with pytest.raises(FedStrataError) as caught:
        Hammer(style="clew")
    assert str(caught.value) == (
        "There is no value for the parameter 'style' of the tool 'hammer' called 'clew'. "
        "Did you mean 'claw'? Known: claw, plain."
    )


def test_a_huge_whole_number_is_checked_without_turning_it_into_a_float():
    assert Hammer(blows=10**400).blows == 10**400


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hamer", "There is no tool 'hamer'. Did you mean 'hammer'? Known: hammer, hand-saw."),
        ("xyz", "There is no tool 'xyz'. Known: hammer, hand-saw."),
        ("hammer+hammer", "'hammer+hammer' names 2 tools; give exactly one."),
        ("hand-saw:1", "The tool 'hand-saw' takes 0 parameters, not 1."),
        ("hammer(1,2,true,plain,a,0,7)", "The tool 'hammer' takes 6 parameters, not 7."),
        ("hammer(1, weight=2)", "The parameter 'weight' of the tool 'hammer' is given twice."),
        ("hammer(blows=1, blows=2)", "The parameter 'blows' of the tool 'hammer' is given twice."),
        (
            "hammer(blow=1)",
            "There is no parameter of the tool 'hammer' called 'blow'. Did you mean 'blows'? "
            "Known: blows, loud, owner, share, style, weight.",
        ),
        ("hammer:1e999", "inf does not fit the parameter 'weight' of the tool 'hammer': it takes a finite number."),
        ("hammer:nan", "nan does not fit the parameter 'weight' of the tool 'hammer': it takes a finite number."),
    ],
)
def test_bad_texts(text, reason):
    with pytest.raises(FedStrataError) as caught:
        tools.make(text)
    assert str(caught.value) == reason


# Registry ------------------------------------------------------------------------------------------------------------


def test_names_are_listed_in_order_and_by_pattern():
    assert tools.names() == ["hammer", "hand-saw"]
    assert tools.names("*saw") == ["hand-saw"]
    assert tools.names("HAMMER") == []
    assert tools.get("hammer") is Hammer
    assert (Hammer.name, Hammer.stands_for) == ("hammer", "tool")


def test_a_name_is_taken_once():
    with pytest.raises(FedStrataError, match="already a tool 'hammer'"):
        tools.register("hammer")(Saw)
    assert tools.get("hammer") is Hammer


def test_a_ready_component_passes_through_but_not_one_of_another_kind():
    tool = Hammer(blows=7)
    assert tools.make(tool) is tool
    others: Registry[Spec] = Registry("machine")
    with pytest.raises(FedStrataError, match=r"'hammer\(blows=7\)' is no machine, it is a tool"):
        others.make(tool)


def test_description_is_plain_data():
    described = tools.describe("hammer")
    assert json.loads(json.dumps(described)) == described
    assert described["summary"] == "Hits things on the head."
    assert described["description"].endswith("More about it.")
    assert (described["name"], described["kind"]) == ("hammer", "tool")
    assert described["parameters"][0] == {
        "name": "weight", "type": "a number", "default": 1.0, "meaning": "How heavy.", "choices": None,
        "source": None, "limits": "more than 0 and at most 10",
    }  # fmt: skip
    assert described["parameters"][3]["choices"] == ["plain", "claw"]
    assert described["parameters"][5]["type"] == "a number or none"
    assert tools.describe("hand-saw")["parameters"] == []
    with pytest.raises(FedStrataError, match="no tool 'axe'"):
        tools.describe("axe")


def test_summary_of_a_class_without_words():
    assert summary(type("Silent", (), {})) == ""


@dataclass(frozen=True)
class OldStyle(Spec):
    size: Optional[int] = parameter(None, "The size.", low=1)  # noqa: UP045 - what users of older Python write


def test_an_optional_parameter_is_checked_however_it_is_written():
    assert OldStyle(3).size == 3
    assert OldStyle().size is None
    with pytest.raises(FedStrataError, match="it takes a whole number or none"):
        OldStyle("3")


def test_unknown_name_without_any_known():
    assert str(unknown_name("thing", "x", [])) == "There is no thing 'x'. Known: none."
