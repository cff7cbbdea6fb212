"""The lanes of the fuzzer by name: what draws an example, and what checks it."""

import functools

from hypothesis import strategies as st

from tests.fuzz import mask_writer, masks


def _masks():
    return mask_writer.programs(), lambda program: _name(masks.check(program))


def _traced():
    def check(example):
        program, dynamic = example
        return _name(masks.check_traced(program, dynamic=dynamic))

    return st.tuples(mask_writer.programs(), st.booleans()), check


def _symbolic():
    strategy = st.tuples(mask_writer.programs(), st.sampled_from([1, 5, 12]))
    return strategy, lambda example: _name(masks.check_symbolic(*example))


def _routing():
    from tests.fuzz import routing

    return routing.scenes(), routing.check


def _attention(device):
    from tests.fuzz import attention

    return attention.calls(device), functools.partial(attention.check, device=device)


def _name(rewritten):
    return "rewritten" if rewritten else "refused"


# each is imported when it is asked for
LANES = {
    "masks": _masks,
    "traced": _traced,
    "symbolic": _symbolic,
    "routing": _routing,
    "inductor": functools.partial(_attention, "cpu"),
    "gpu": functools.partial(_attention, "cuda"),
}
