"""The language a lifted mask is written in: a conjunction of statements about (b, h, q, k)."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy

if TYPE_CHECKING:
    from torch import fx

B, H, Q, K = INDICES = sympy.symbols("b h q k", integer=True, nonnegative=True)

Coords = tuple[sympy.Expr, ...]


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a tensor of the graph, its coordinates written in b, h, q and k."""

    node: fx.Node
    coords: Coords


@dataclass(frozen=True, slots=True)
class Compare:
    """left <= right, left == right or left != right, over integers."""

    op: str
    left: sympy.Expr
    right: sympy.Expr
    origin: Element | None


@dataclass(frozen=True, slots=True)
class Load:
    """The element is not zero."""

    element: Element


@dataclass(frozen=True, slots=True)
class Unread:
    """A statement that was not understood; origin is the element that holds its value, if any."""

    text: str
    origin: Element | None = None


@dataclass(frozen=True, slots=True)
class Never:
    """False everywhere."""


Conjunct = Compare | Load | Unread | Never
Formula = tuple[Conjunct, ...]
TRUE: Formula = ()
FALSE: Formula = (Never(),)

_PYTHON = {
    "le": operator.le,
    "lt": operator.lt,
    "ge": operator.ge,
    "gt": operator.gt,
    "eq": operator.eq,
    "ne": operator.ne,
}


def literal(value: bool) -> Formula:
    """The formula that is value everywhere."""
    return TRUE if value else FALSE


def compare_numbers(op: str, left: float, right: float) -> bool:
    """The comparison op ("le", "lt", ...) on two Python numbers."""
    return bool(_PYTHON[op](left, right))


def compare(op: str, left: sympy.Expr, right: sympy.Expr, origin: Element | None) -> Formula:
    """The comparison op over two integer expressions, decided on the spot where it is constant."""
    gap = sympy.expand(left - right)
    if gap.is_Integer:
        return literal(compare_numbers(op, int(gap), 0))
    if op in ("ge", "gt"):
        op, left, right = {"ge": "le", "gt": "lt"}[op], right, left
    if op == "lt":
        op, left = "le", left + 1
    return (Compare({"le": "<=", "eq": "==", "ne": "!="}[op], left, right, origin),)


def conjoin(*formulas: Formula) -> Formula:
    """All of the formulas hold."""
    together = tuple(dict.fromkeys(part for formula in formulas for part in formula))
    return FALSE if FALSE[0] in together else together


def disjoin(left: Formula, right: Formula, origin: Element | None) -> Formula:
    """One of the two holds; the language has no "or", so only the trivial cases are read."""
    if left == TRUE or right == FALSE:
        return left
    if right == TRUE or left == FALSE:
        return right
    return (Unread("or", origin),)


def negate(formula: Formula, origin: Element | None) -> Formula:
    """The formula does not hold: the opposite comparison, or a statement that was not read."""
    if formula in (TRUE, FALSE):
        return literal(formula == FALSE)
    match formula:
        case (Compare("<=", left, right),):  # not left <= right, over integers
            return (Compare("<=", right + 1, left, origin),)
        case (Compare("==" | "!=" as op, left, right),):
            return (Compare("!=" if op == "==" else "==", left, right, origin),)
        case _:
            return (Unread("not", origin),)
