"""The faults that are put into a file, one at a time.

Most are mutmut's: other operators, other truth values, other branches, arguments left out. Left out are its faults that
put None in the place of a value, because nearly all of them crash and would only flatter the score. Added are faults
that matter here: a hook that is missing, a condition turned round, and one word of PyTorch for another.

Words for people are left alone: docstrings, errors, notes, facts, what a parameter means. So is what only type checkers
read: protocols and abstract methods, which nobody runs.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import libcst as cst
import libcst.matchers as m
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider, WhitespaceInclusivePositionProvider
from mutmut.mutation import mutators

SWAPPED = {
    "mean": "sum", "sum": "mean", "max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum",
    "amax": "amin", "amin": "amax", "argmax": "argmin", "argmin": "argmax", "any": "all", "all": "any",
    "floor": "ceil", "ceil": "floor", "zeros": "ones", "ones": "zeros", "zeros_like": "ones_like",
    "ones_like": "zeros_like", "new_zeros": "new_ones", "new_ones": "new_zeros",
}  # fmt: skip
"""Words of PyTorch and Python, each with the one that takes its place."""

SKIPPED = {
    "abs",
    "square",
    "sqrt",
    "exp",
    "log",
    "sigmoid",
    "softmax",
    "clamp",
    "clamp_min",
    "clamp_max",
    "sign",
    "round",
}
"""Methods of tensors that are left out: ``x.abs()`` becomes ``x``."""

WORDS_ONLY = {"Facts", "FedStrataError", "FedStrataWarning", "warn", "cast", "TypeVar"}
"""Calls whose arguments are words for people or for type checkers."""

STREAMS = {"key", "keys", "client_keys", "noise", "numpy_generator"}
"""Calls whose words name a stream of random numbers: under another name, the draws are others, and as good."""

UNSEEN_ARGUMENTS = {"strict", "device", "stable"}
"""Arguments that guard against what does not happen, or that a test on a CPU cannot see: there all sorts are stable."""


@dataclass(frozen=True)
class Mutant:
    """One fault in one file."""

    function: str
    """Where it is, such as ``Transient.start``; empty outside of functions and classes."""
    line: int
    source: str
    """The whole file with the fault in it."""
    diff: str
    change: str
    """The lines that differ, before and after, by which a mutant is recognised in a list."""


def mutants_of(source: str) -> list[Mutant]:
    """Make every mutant of a file, in the order of its lines."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = _Mutating()
    wrapper.visit(visitor)
    spans = wrapper.resolve(WhitespaceInclusivePositionProvider)
    made = [
        _mutant(source, _spliced(wrapper.module, source, spans[old], old, new), function, line, new is None)
        for function, line, old, new in visitor.found
    ]
    return sorted({one.source: one for one in made}.values(), key=lambda one: one.line)


def _spliced(module: cst.Module, source: str, span: CodeRange, old: cst.CSTNode, new: cst.CSTNode | None) -> str:
    """Put other text in the place of a node; where it is no stretch of text of its own, through the whole tree."""
    lines = source.splitlines(keepends=True)
    begin, end = (sum(map(len, lines[: at.line - 1])) + at.column for at in (span.start, span.end))
    if new is not None and source[begin:end] == module.code_for_node(old):
        return source[:begin] + module.code_for_node(new) + source[end:]
    changed = module.deep_remove(old) if new is None else module.deep_replace(old, new)
    assert isinstance(changed, cst.Module)
    return changed.code


def _mutant(source: str, changed: str, function: str, line: int, missing: bool) -> Mutant:
    before, after = source.splitlines(), changed.splitlines()
    same = _alike(before, after)
    same_end = _alike(before[same:][::-1], after[same:][::-1])
    removed, added = before[same : len(before) - same_end], after[same : len(after) - same_end]
    diff = [f"@@ -{same + 1},{len(removed)} +{same + 1},{len(added)} @@", *(f"-{text}" for text in removed)]
    told = f"def {function.split('.')[-1]}" if missing else _joined(removed)
    return Mutant(
        function, line, changed, "\n".join([*diff, *(f"+{one}" for one in added)]), f"{told} -> {_joined(added)}"
    )


def _alike(before: Sequence[str], after: Sequence[str]) -> int:
    """Count the lines at the beginning that are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))


def _joined(lines: Sequence[str]) -> str:
    return " ".join(text.strip() for text in lines) or "nothing"


class _Mutating(cst.CSTVisitor):
    """Goes through a file and notes each place with what could stand there instead."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        self.found: list[tuple[str, int, cst.CSTNode, cst.CSTNode | None]] = []
        self.place: list[cst.ClassDef | cst.FunctionDef] = []
        self.words: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Leave words alone; elsewhere, note the mutants of this node and go on to its parts."""
        if _is_words(node) or node in self.words:
            return isinstance(node, cst.ComparisonTarget)
        self.words |= set(_words_in(node))
        in_class = bool(self.place) and isinstance(self.place[-1], cst.ClassDef)
        if isinstance(node, cst.ClassDef | cst.FunctionDef):
            self.place.append(node)
        for old, new in _instead(node, in_class):
            line = self.get_metadata(PositionProvider, old).start.line  # type: ignore[attr-defined]
            self.found.append((".".join(one.name.value for one in self.place), line, old, new))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        """Come back to what encloses a function or class."""
        if self.place and self.place[-1] is original_node:
            self.place.pop()


def _is_words(node: cst.CSTNode) -> bool:
    match node:
        case cst.Annotation() | cst.Decorator() | cst.Raise() | cst.Assert() | cst.Import() | cst.ImportFrom():
            return True
        case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()):
            return True
        case cst.SimpleString() | cst.ConcatenatedString() | cst.FormattedString():
            return " " in cst.Module([]).code_for_node(node)
        case cst.Call():
            return _called(node) in WORDS_ONLY
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name("__all__"))]):
            return True
        case cst.ClassDef(bases=[cst.Arg(value=cst.Name("Protocol"))]):
            return True
        case cst.Arg(keyword=cst.Name(value=name)):
            return name in UNSEEN_ARGUMENTS
    return False


def _words_in(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the parts of a node that are left alone, although they would get mutants elsewhere."""
    match node:
        case cst.Call() if _called(node).lstrip("_").startswith("check_") or _called(node) in STREAMS:
            # What a value is called in an error, and what a stream is called.
            yield from (one.value for one in node.args if isinstance(one.value, cst.SimpleString))
        case cst.Comparison(left=cst.Call() as drawn, comparisons=[target]):
            # Whether a number that is drawn may equal a bound: it hardly ever does.
            if _called(drawn) == "uniform" or m.matches(drawn.func, m.Attribute(m.Call(m.Name("uniform")))):
                yield target


def _called(node: cst.Call) -> str:
    match node.func:
        case cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name)):
            return name
    return ""


def _instead(node: cst.CSTNode, in_class: bool) -> Iterator[tuple[cst.CSTNode, cst.CSTNode | None]]:
    """Yield what may stand in the place of a node, or of a part of it; None where it may be missing."""
    match node:
        case cst.Integer():
            yield node, next(iter(mutators.operator_number(node)))
        case cst.Float(value=value):
            # One more would leave the bounds of most parameters. Half of something tiny could not be told from it.
            changed = float(value) / 2 if 0.001 <= float(value) < 1 else float(value) + 1
            yield node, cst.Float(repr(changed))
        case cst.SimpleString():
            yield node, next(iter(mutators.operator_string(node)))
        case cst.FunctionDef() if in_class and not node.name.value.startswith("_") and not _is_abstract(node):
            yield node, None
        case cst.Call():
            yield from ((node, new) for new in _calls(node))
        case cst.If(test=test) | cst.CompIf(test=test) if not _turned_by_mutmut(test):
            yield test, _not(test)
    for kind, operator in MUTMUT:
        if isinstance(node, kind):
            yield from ((node, new) for new in operator(node))


def _is_abstract(node: cst.FunctionDef) -> bool:
    return any(m.matches(one.decorator, m.Name("abstractmethod")) for one in node.decorators)


def _calls(node: cst.Call) -> Iterator[cst.CSTNode]:
    name = _called(node)
    if name in STREAMS:
        return
    if name in SWAPPED:
        func = node.func
        new = cst.Name(SWAPPED[name])
        yield node.with_changes(func=new if isinstance(func, cst.Name) else func.with_changes(attr=new))
    if name in SKIPPED and isinstance(node.func, cst.Attribute) and not m.matches(node.func.value, m.Name("torch")):
        yield node.func.value
    for place, argument in enumerate(node.args):
        if (argument.keyword is not None or _may_be_short(node)) and not _is_words(argument):
            yield node.with_changes(args=[*node.args[:place], *node.args[place + 1 :]])


def _may_be_short(node: cst.Call) -> bool:
    """Whether an argument without a name may be optional: PyTorch's and Python's own; ours would only crash."""
    if isinstance(node.func, cst.Name):
        return len(node.args) > 1 and hasattr(builtins, node.func.value)
    return not m.matches(node.func, m.Attribute(value=m.Name("self") | m.Call(func=m.Name("super"))))


def _turned_by_mutmut(test: cst.BaseExpression) -> bool:
    match test:
        case cst.UnaryOperation(operator=cst.Not()):
            return True
        case cst.Comparison(comparisons=[cst.ComparisonTarget(operator=operator)]):
            return isinstance(operator, cst.Equal | cst.NotEqual | cst.In | cst.NotIn | cst.Is | cst.IsNot)
    return False


def _not(test: cst.BaseExpression) -> cst.BaseExpression:
    inner = test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.UnaryOperation(cst.Not(), inner)


MUTMUT: Iterable[tuple[type[cst.CSTNode], object]] = [
    (kind, operator)
    for kind, operator in mutators.mutation_operators
    if operator
    not in (
        mutators.operator_number, mutators.operator_string, mutators.operator_arg_removal, mutators.operator_assignment,
        mutators.operator_lambda,
    )
]  # fmt: skip
"""mutmut's faults that are taken over as they are."""
