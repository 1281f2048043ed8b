"""Make the mutants of a module: one changed operator, constant or assignment each."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType

__all__ = ["Mutant", "compiled", "mutants_of"]

_COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Change = Callable[[], ast.AST]
"""Change a node of a tree in place, and return the changed node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    number: int
    """Place among the mutants of the module."""
    lines: range
    """Lines of the changed expression and the first line of its statement."""
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.was}  ->  {self.now}"


def mutants_of(source: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of the source.

    Example:
        >>> [str(each) for each in mutants_of("def f(a):\\n    return a < 2")]
        ['a < 2  ->  a <= 2', '2  ->  3']
    """
    mutants = []
    for number, (statement, node, change) in enumerate(_changes(ast.parse(source))):
        was = ast.unparse(node)
        last = node.end_lineno or node.lineno
        # A part of the text: the change is made for good, so `was` comes first.
        now = ast.unparse(change())
        lines = range(min(statement.lineno, node.lineno), last + 1)
        mutants.append(Mutant(number=number, lines=lines, was=was, now=now))
    return mutants


def compiled(source: str, name: str, number: int) -> CodeType:
    """Return the code of a module with one mutant."""
    tree = ast.parse(source)
    for place, (_, _, change) in enumerate(_changes(tree)):
        if place == number:
            change()
            break
    return compile(ast.fix_missing_locations(tree), name, "exec", dont_inherit=True)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.expr | ast.stmt, Change]]:
    """Yield statement, node and change of every mutant in the bodies of functions."""
    for function in ast.walk(tree):
        if isinstance(function, _FUNCTIONS):
            for place, statement in enumerate(function.body):
                for replaced in _replacements(statement):
                    swap = _swap(function, "body", place, statement, replaced)
                    yield statement, statement, swap
                yield from _changes_in(statement, statement)


def _changes_in(
    node: ast.AST, statement: ast.stmt
) -> Iterator[tuple[ast.stmt, ast.expr | ast.stmt, Change]]:
    # Inner functions have their own turn; annotations have no effect.
    if isinstance(node, _FUNCTIONS):
        return
    if isinstance(node, ast.stmt):
        statement = node
    for field, value in list(ast.iter_fields(node)):
        if field == "annotation":
            continue
        for place, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST):
                continue
            at = place if isinstance(value, list) else None
            if isinstance(child, ast.expr | ast.stmt):
                below = child if isinstance(child, ast.stmt) else statement
                for replaced in _replacements(child):
                    yield below, child, _swap(node, field, at, child, replaced)
            yield from _changes_in(child, statement)


def _swap(node: ast.AST, field: str, at: int | None, old: ast.AST, new: ast.AST) -> Change:
    """Return a change that puts a node into the place of another."""

    def change() -> ast.AST:
        ast.copy_location(new, old)
        if at is None:
            setattr(node, field, new)
        else:
            getattr(node, field)[at] = new
        return new

    return change


def _replacements(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, [operator, *others], comparators):
            if (other := _COMPARED.get(type(operator))) is not None:
                yield ast.Compare(left, [other(), *others], comparators)
        case ast.BinOp(left, operator, right):
            if (computed := _COMPUTED.get(type(operator))) is not None:
                yield ast.BinOp(left, computed(), right)
        case ast.BoolOp(ast.And(), values):
            yield ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(ast.Or(), values):
            yield ast.BoolOp(ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield ast.Pass()
