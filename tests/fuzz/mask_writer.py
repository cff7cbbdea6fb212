"""Draws mask programs as users and libraries write them: positions, padding, windows, offsets."""

import operator
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tests.fuzz.programs import Program

HEADS, D = 2, 16
COMPARISONS = (operator.le, operator.lt, operator.ge, operator.gt, torch.le, torch.ge)
RARE = (operator.eq, operator.ne)


@st.composite
def programs(draw):
    """A program whose mask is broadcastable to (B, HEADS, Lq, Lkv), bool or additive."""
    B = draw(st.sampled_from([1, 2, 2, 3]))
    Lq = draw(st.sampled_from([16, 33, 40, 64, 128, 150]))
    Lkv = Lq + draw(st.sampled_from([0, 0, 0, 1, 16, 57]))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    inputs = {
        "query": torch.randn(B, HEADS, Lq, D, generator=gen),
        "key": torch.randn(B, HEADS, Lkv, D, generator=gen),
        "value": torch.randn(B, HEADS, Lkv, D, generator=gen),
        "attention_mask": draw(paddings(B, Lkv, gen)),
        "document": torch.randint(0, 3, (B, Lkv), generator=gen).sort(-1).values,
        "cache_position": torch.arange(Lkv - Lq, Lkv) + draw(st.sampled_from([0, 0, 0, 1, -3])),
        "lengths": torch.randint(1, Lkv + 1, (B,), generator=gen),
    }
    program = Program(list(inputs), list(inputs.values()))
    writer = _Writer(draw, program, B, Lq, Lkv)
    # most masks of users hold the causal one, and without it every program would be refused
    mask = writer.causal() if draw(st.integers(0, 9)) else writer.statement()
    for _ in range(draw(st.integers(0, 3))):
        mask = writer.combined(mask)
    program.result = writer.finished(mask)
    return program


@st.composite
def paddings(draw, B, Lkv, gen):
    """[B, Lkv] ones with padding on the left, the right, nowhere, or holes; int64 or bool."""
    kind = draw(st.sampled_from(["none", "left", "right", "holes", "row"]))
    tokens, pads = torch.arange(Lkv), torch.randint(0, Lkv, (B, 1), generator=gen)
    mask = {
        "none": torch.ones(B, Lkv, dtype=torch.bool),
        "left": tokens >= pads,
        "right": tokens < Lkv - pads,
        "holes": torch.rand(B, Lkv, generator=gen) > 0.3,
        "row": (tokens >= 0) & (torch.arange(B)[:, None] > 0),
    }[kind]
    return mask if draw(st.booleans()) else mask.long()


@dataclass(slots=True)
class _Writer:
    """Writes one program: each method adds steps and gives the Ref of what they made."""

    draw: object
    program: Program
    B: int
    Lq: int
    Lkv: int

    def pick(self, *choices):
        return self.draw(st.sampled_from(choices))

    def positions(self, length, start):
        """[length] integers, most often start, start + 1, ..."""
        call, way = self.program.call, self.draw(st.integers(0, 5))
        if way == 0 and length == self.Lq:
            return self.program.named("cache_position")
        if way == 1:
            return call(torch.arange, start, start + length)
        if way == 2:
            wide = call(torch.arange, start + length + 3)
            return call(operator.getitem, wide, slice(start, start + length, None))
        if way == 3:
            return call(operator.add, call(torch.arange, length), start)
        found = call(torch.arange, length)
        return call(operator.add, found, start) if start else found

    def moved(self, x):
        """Now and then some arithmetic on positions."""
        call = self.program.call
        way, c = self.draw(st.integers(0, 27)), self.draw(st.integers(-9, 9))
        changes = {
            0: lambda: call(operator.add, x, c),
            1: lambda: call(operator.sub, x, c),
            2: lambda: call("int", x),
            3: lambda: call(operator.floordiv, x, abs(c) + 1),
            4: lambda: call(operator.mod, x, abs(c) + 1),
            5: lambda: call(operator.mul, x, self.pick(1, 2, -1)),
            6: lambda: call(torch.clamp, x, min=c),
            7: lambda: call("float", x),
            8: lambda: call("to", x, torch.int8),
            9: lambda: call("flip", x, 0),
            10: lambda: call("cumsum", x, 0),
            11: lambda: call(operator.neg, x),
            12: lambda: call("add_", x, c),
            13: lambda: call(operator.iadd, call("clone", x), c),
        }
        return changes[way]() if way in changes else x

    def column(self, x):
        """[Lq] as [Lq, 1], in one of its spellings."""
        call = self.program.call
        way = self.draw(st.integers(0, 4))
        if way == 0:
            return call("view", x, -1, 1)
        if way == 1:
            return call("unsqueeze", x, -1)
        if way == 2:
            return call(operator.getitem, x, (None, None, slice(None), None))
        if way == 3:
            return call("reshape", x, 1, 1, -1, 1)
        return call(operator.getitem, x, (slice(None), None))

    def row(self, x):
        """[Lkv] as it is, or with dims in front."""
        call, way = self.program.call, self.draw(st.integers(0, 2))
        if way == 0:
            return call(operator.getitem, x, (None, slice(None)))
        if way == 1:
            return call(operator.getitem, x, (None, None, None, slice(None)))
        return x

    def q(self):
        return self.column(self.moved(self.positions(self.Lq, self.Lkv - self.Lq)))

    def k(self):
        return self.row(self.moved(self.positions(self.Lkv, 0)))

    def causal(self):
        """k <= q in one of its spellings, with some arithmetic on the positions."""
        call, diagonal = self.program.call, self.Lkv - self.Lq
        way = self.draw(st.integers(0, 6))
        if way == 0:
            ones = call(torch.ones, self.Lq, self.Lkv, dtype=torch.bool)
            return call(torch.tril, ones, diagonal=diagonal)
        if way == 1:
            ones = call(torch.ones, self.Lq, self.Lkv)
            return call(operator.eq, call("triu", ones, diagonal + 1), 0)
        if way == 2:
            return call("logical_not", call(operator.gt, self.k(), self.q()))
        if way == 3:
            return call(operator.ge, self.q(), self.k())
        return call(self.pick(operator.le, torch.le), self.k(), self.q())

    def statement(self):
        """Any boolean tensor over (b, h, q, k), or a part of them."""
        kinds = (
            self.compared, self.compared, self.padded, self.padded, self.padded, self.window,
            self.window, self.documents, self.limited, self.constant, self.per_head, self.chunk,
        )  # fmt: skip
        return self.pick(*kinds)()

    def compared(self):
        op = self.pick(*COMPARISONS, *COMPARISONS, *RARE)
        return self.program.call(op, *self.pick((self.q(), self.k()), (self.k(), self.q())))

    def padded(self):
        call, mask = self.program.call, self.program.named("attention_mask")
        way = self.draw(st.integers(0, 4))
        mask = call("bool", mask) if way else call(operator.ne, mask, 0)
        if way == 1:
            batch = call(torch.arange, self.B)
            batch = call(operator.getitem, batch, (slice(None), None, None, None))
            key = call(operator.getitem, call(torch.arange, self.Lkv), (None, None, None))
            return call(operator.getitem, mask, (batch, key))
        if way == 2:  # by the query's row: padding of queries
            tail = call(operator.getitem, mask, (slice(None), slice(self.Lkv - self.Lq, None)))
            return call(operator.getitem, tail, (slice(None), None, slice(None), None))
        return call(operator.getitem, mask, (slice(None), None, None))

    def window(self):
        call, size = self.program.call, self.draw(st.integers(1, self.Lkv))
        edge = call(operator.sub, self.q(), size)
        if self.draw(st.booleans()):
            return call(operator.gt, self.k(), edge)
        gap = call(operator.sub, self.q(), self.k())
        return call(operator.lt, gap, size)

    def chunk(self):
        call, size = self.program.call, self.draw(st.integers(2, 40))
        left, right = (call(operator.floordiv, x, size) for x in (self.q(), self.k()))
        return call(operator.eq, left, right)

    def documents(self):
        call, ids = self.program.call, self.program.named("document")
        mine = call(operator.getitem, ids, (slice(None), slice(self.Lkv - self.Lq, None)))
        mine = call(operator.getitem, mine, (slice(None), None, slice(None), None))
        return call(operator.eq, mine, call(operator.getitem, ids, (slice(None), None, None)))

    def limited(self):
        call = self.program.call
        if self.draw(st.booleans()):
            return call(operator.lt, self.k(), self.draw(st.integers(0, self.Lkv + 2)))
        lengths = self.program.named("lengths")
        lengths = call(operator.getitem, lengths, (slice(None), None, None, None))
        return call(operator.lt, self.k(), lengths)

    def constant(self):
        shape = self.pick((self.Lq, self.Lkv), (1, 1), (self.B, 1, self.Lq, self.Lkv))
        return self.program.call(torch.full, shape, self.pick(True, True, False))

    def per_head(self):
        call = self.program.call
        heads = call(operator.getitem, call(torch.arange, HEADS), (slice(None), None, None))
        return call(operator.le, call(operator.mul, heads, self.pick(1, 3)), self.k())

    def combined(self, mask):
        """mask joined with another statement, reshaped, or written into."""
        call, way = self.program.call, self.draw(st.integers(0, 15))
        if way < 8:
            return call(self.pick(operator.and_, torch.logical_and), mask, self.statement())
        if way == 8:
            return call(operator.or_, mask, self.statement())
        if way == 9:
            return call(operator.mul, mask, self.statement())
        if way == 10:
            return call(torch.where, mask, self.statement(), self.pick(False, False, True))
        if way == 11:
            return call("masked_fill", mask, self.statement(), self.pick(False, False, True))
        if way == 12:
            return call(operator.invert, call(operator.invert, mask))
        if way == 13:
            return self.written_into(mask)
        if way == 14:
            return call("transpose", call("transpose", mask, -1, -2), -2, -1)
        return call(operator.xor, mask, self.statement())

    def written_into(self, mask):
        """An in-place change of a copy that has all elements."""
        call = self.program.call
        shape = (self.B, HEADS, self.Lq, self.Lkv)
        mask = call("clone", call("expand", mask, *shape))
        at = self.pick((0, 0), (slice(None), slice(None), slice(0, 2)), (slice(None), 1))
        if self.draw(st.booleans()):
            call(operator.setitem, mask, at, self.pick(True, False))
            return mask
        call("fill_", call(operator.getitem, mask, at), self.pick(True, False))
        return mask

    def finished(self, mask):
        """As SDPA takes it: bool, or additive in query's dtype."""
        call, way = self.program.call, self.draw(st.integers(0, 11))
        lowest = torch.finfo(torch.float32).min
        hidden = self.pick(float("-inf"), float("-inf"), lowest, -1.0)
        if way == 0:
            zero, low = call(torch.tensor, 0.0), call(torch.tensor, hidden)
            return call(torch.where, mask, zero, low)
        if way == 1:
            zeros = call(torch.zeros, self.Lq, self.Lkv)
            return call("masked_fill", zeros, call(operator.invert, mask), hidden)
        if way == 2:
            wide = call(torch.full, (self.Lq, self.Lkv), hidden)
            return call(torch.triu, wide, diagonal=self.Lkv - self.Lq + 1)
        if way == 3:
            return call(operator.mul, call(operator.sub, 1.0, call("float", mask)), lowest)
        if way == 4:
            return call("expand", mask, self.B, HEADS, self.Lq, self.Lkv)
        return mask
