"""benchmarks/noise_growth.py: what selections keep on maps whose counts are known."""

import pytest
import torch


def test_maps_hold_what_they_say(module_of):
    noise = module_of("noise_growth")
    mass, special = noise.maps(16384, structure=0.8, spread=0.5, draws=4)
    torch.testing.assert_close(mass.sum(-1), torch.ones(4))
    torch.testing.assert_close((mass * special).sum(-1), torch.full((4,), 0.8))
    assert special.sum(-1).tolist() == [2 + noise.SPIKES] * 4
    assert not torch.equal(special[0], special[1])
    again, _ = noise.maps(16384, structure=0.8, spread=0.5, draws=4)
    assert torch.equal(mass, again)


def test_an_even_background_costs_mass_a_share_and_the_floor_nothing(module_of):
    noise = module_of("noise_growth")
    rows = noise.experiment(
        tokens=(16384, 65536), structures=(0.8,), spreads=(0.0,), draws=2
    )  # fmt: skip
    got = {row["selection"]: row for row in rows}
    # .9 needs half of the background besides the ten, .95 three quarters
    for name, share in (("cumulative .9", 0.5), ("cumulative .95", 0.75)):
        want = [10 + share * (blocks - 10) for blocks in (128, 512)]
        assert got[name]["kept"] == pytest.approx(want, abs=1)
    # fewer than k_min spikes never: there are eight
    assert got["floor alpha 1"]["kept"] == [10, 10]
    assert got["floor alpha 1"]["background_kept"] == [0, 0]
    # ours pays for .9 as well; an even background is kept as a whole
    assert got["audited .9"]["kept"] == [128, 512]
    assert got["audited .9"]["exponent"] == pytest.approx(1)


def test_the_audited_floor_stops_at_its_coverage(module_of):
    noise = module_of("noise_growth")
    mass, special = noise.maps(16384, structure=0.97, spread=0.25, draws=4)
    kept = noise.audited_floor(mass, 0.9)
    assert ((mass * kept).sum(-1) >= 0.9).all()
    assert not (kept & ~special).any()
    assert noise.audited_floor(mass, 1.0).all()


def test_the_exponent_of_a_power_is_its_exponent(module_of):
    exponent = module_of("noise_growth").exponent
    assert exponent([1, 2, 4], [3, 6, 12]) == pytest.approx(1)
    assert exponent([1, 4, 16], [5, 10, 20]) == pytest.approx(0.5)
    assert exponent([1, 4, 16], [7, 7, 7]) == pytest.approx(0)
