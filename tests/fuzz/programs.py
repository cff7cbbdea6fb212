"""Programs that build an attention mask step by step.

A program is a list of calls with known values, so it can be made into an FX graph without tracing,
or be run as a Python function under Dynamo.
"""

import operator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

SDPA = torch.nn.functional.scaled_dot_product_attention
# Smaller numbers may be a dim, a step or a constant as well.
LEAST_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Ref:
    """The result of step `at` (an input, if negative: -1 is the first)."""

    at: int


@dataclass(slots=True, repr=False)
class Program:
    """Inputs and steps; each step is run as it is added, so that shapes are known.

    Attributes:
        names: Of the inputs, query, key and value first.
        inputs: Copies of what they are given; a step may write into them.
        steps: (target, args, kwargs); a target that is a string is a method's name.
        values: What each step gave, at that moment.
        result: The mask.
    """

    names: list[str]
    given: list[torch.Tensor]
    inputs: list[torch.Tensor] = field(init=False)
    steps: list[tuple] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    result: Ref | None = None

    def __post_init__(self):
        self.inputs = [x.clone() for x in self.given]

    def __repr__(self):
        mask = self.value(self.result)
        return f"Program(of {len(self.steps)} steps, mask {mask.dtype} {list(mask.shape)})"

    def fresh_inputs(self):
        return [x.clone() for x in self.given]

    def shorter_inputs(self, tokens):
        """fresh_inputs with that many queries and keys less."""
        Lq, Lkv = (x.shape[2] - tokens for x in self.given[:2])
        cut = {"query": Lq, "key": Lkv, "value": Lkv}
        cut |= {"attention_mask": Lkv, "document": Lkv, "cache_position": Lq}
        return [
            x.clone() if name not in cut
            else x.narrow(2 if x.dim() == 4 else -1, 0, cut[name]).clone()
            for name, x in zip(self.names, self.given, strict=True)
        ]  # fmt: skip

    def value(self, ref):
        return self.inputs[-1 - ref.at] if ref.at < 0 else self.values[ref.at]

    def named(self, name):
        return Ref(-1 - self.names.index(name))

    def call(self, target, *args, **kwargs):
        """Add a step, unless it raises: a user's program would not get past that line either."""
        done = _perform(target, _filled(args, self.value), _filled(kwargs, self.value))
        self.steps.append((target, args, kwargs))
        self.values.append(done)
        return Ref(len(self.steps) - 1)

    def graph(self):
        """SDPA under the mask as a Dynamo-like graph, and its mask node."""
        graph, mode = fx.Graph(), FakeTensorMode()
        nodes, bases = {}, {}

        def made(node, value):
            if value is None:
                return node
            storage = value.untyped_storage()
            with mode:  # from_tensor would take ten times as long; views must share a storage
                if storage._cdata not in bases:
                    size = storage.nbytes() // value.element_size()
                    bases[storage._cdata] = torch.empty(size, dtype=value.dtype)
                node.meta["example_value"] = torch.as_strided(
                    bases[storage._cdata], value.shape, value.stride(), value.storage_offset()
                )
            return node

        for i, (name, value) in enumerate(zip(self.names, self.inputs, strict=True)):
            nodes[-1 - i] = made(graph.placeholder(name), value)
        for i, (target, args, kwargs) in enumerate(self.steps):
            make = graph.call_method if isinstance(target, str) else graph.call_function
            full = (_filled(x, lambda r: nodes[r.at]) for x in (args, kwargs))
            nodes[i] = made(make(target, *full), self.values[i])
        mask = nodes[self.result.at]
        q, k, v = (nodes[-1 - i] for i in range(3))
        site = graph.call_function(SDPA, (q, k, v), {"attn_mask": mask})
        made(site, self.inputs[0].new_empty(self.inputs[0].shape))
        graph.output((site,))
        return fx.GraphModule(torch.nn.Module(), graph), mask

    def function(self, *, sized=False):
        """The same as a Python function of the inputs; it gives SDPA's result and the mask.

        sized: Numbers that are a length are read off the shapes of query and key, so that the
        function means the same at other lengths, and traced with dynamic shapes is symbolic.
        """
        steps, result = self.steps, self.result
        Lq, Lkv = (x.shape[2] for x in self.given[:2])

        def run(*inputs):
            values, sizes = [], {}
            if sized:
                q, k = inputs[0].shape[2], inputs[1].shape[2]
                sizes = {Lkv + 3: k + 3, Lq: q, Lkv: k}
                if Lkv - Lq > LEAST_LENGTH:
                    sizes.update({Lkv - Lq: k - q, Lkv - Lq + 1: k - q + 1})

            def value(ref):
                return inputs[-1 - ref.at] if ref.at < 0 else values[ref.at]

            for target, args, kwargs in steps:
                full = (_filled(x, value, sizes) for x in (args, kwargs))
                values.append(_perform(target, *full))
            mask = value(result)
            return SDPA(*inputs[:3], attn_mask=mask), mask

        return run


def _perform(target, args, kwargs):
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    if target is operator.setitem:  # a function that Dynamo does not trace, unlike the statement
        args[0][args[1]] = args[2]
        return None
    return target(*args, **kwargs)


def _filled(x, value, sizes=None):
    if isinstance(x, Ref):
        return value(x)
    if isinstance(x, (tuple, list)):
        return type(x)([_filled(y, value, sizes) for y in x])
    if isinstance(x, dict):
        return {name: _filled(y, value, sizes) for name, y in x.items()}
    if isinstance(x, slice):
        return slice(*[_filled(y, value, sizes) for y in (x.start, x.stop, x.step)])
    if sizes and type(x) is int and x in sizes:
        return sizes[x]
    return x
