"""Every spelling of the call is found, with its arguments by name."""

import torch
import torch.nn.functional as F
from graphs import capture, causal

from crisp_flex.passes.match import find_sdpa_sites, module_path


def test_positional_and_keyword_arguments_are_bound_alike():
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    mask = torch.ones(16, 16, dtype=torch.bool)
    by_position = capture(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, 0.0, False, scale=0.5),
        *(q, k, v, mask),
    )
    by_name = capture(
        lambda q, k, v, m: F.scaled_dot_product_attention(
            key=k, value=v, query=q, attn_mask=m, scale=0.5
        ),
        *(q, k, v, mask),
    )
    for gm in (by_position, by_name):
        (site,) = find_sdpa_sites(gm)
        names = [node.name for node in (site.query, site.key, site.value, site.attn_mask)]
        assert names == ["l_q_", "l_k_", "l_v_", "l_m_"]
        assert (site.dropout_p, site.is_causal, site.scale, site.enable_gqa) == (
            0.0,
            False,
            0.5,
            False,
        )


def test_both_spellings_of_torch_are_one_target():
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    gm = capture(
        lambda q, k, v: (
            F.scaled_dot_product_attention(q, k, v)
            + torch._C._nn.scaled_dot_product_attention(q, k, v)
        ),
        *(q, k, v),
    )
    assert [site.index for site in find_sdpa_sites(gm)] == [0, 1]


def test_the_aten_call_of_an_exported_program_is_found():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return causal(q, k, v)

    inputs = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
    program = torch.export.export(Attention(), inputs)
    (site,) = find_sdpa_sites(program.graph_module)
    assert (site.is_causal, site.enable_gqa) == (True, True)


def test_other_attention_is_not_found():
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    gm = capture(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v, q, k, v)
    assert list(find_sdpa_sites(gm)) == []


def test_the_module_path_is_that_of_named_modules():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])
            self.named = torch.nn.ModuleDict({"last": Layer()})

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.named["last"](x)

    model = Model()
    paths = {name for name, _ in model.named_modules()}
    gm = capture(model, torch.randn(1, 2, 16, 8))
    found = [site.module_path for site in find_sdpa_sites(gm)]
    assert found == ["layers.0", "layers.1", "named.last"]
    assert set(found) <= paths
    assert all(module_path(site.node) == site.module_path for site in find_sdpa_sites(gm))


def test_sites_of_nested_graphs_come_last_and_are_marked():
    def fn(q):
        first = torch.utils.checkpoint.checkpoint(
            lambda x: F.scaled_dot_product_attention(x, x, x), q, use_reentrant=False
        )
        return F.scaled_dot_product_attention(first, first, first)

    sites = list(find_sdpa_sites(capture(fn, torch.randn(1, 2, 16, 8))))
    assert [site.nested for site in sites] == [False, True]
