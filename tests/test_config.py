"""CrispConfig: every wrong value is refused with a sentence that names it."""

import dataclasses

import pytest

from crisp_flex import ConfigError, CrispConfig

WRONG = {
    "policy": ("hybird", "policy must be one of hybrid, bounded, .*, oracle, got 'hybird'"),
    "router": ("jsd2", "router must be one of"),
    "backend": ("cuda", "backend must be one of auto, flash, triton"),
    "coverage_reduce": ("max", "coverage_reduce must be one of mean, min"),
    "enabled": (1, "enabled must be True or False"),
    "block_size": ((128, 100), r"block_size must be two powers of two in \[16, 512\]"),
    "min_seqlen": (0, "min_seqlen must be an integer >= 1"),
    "dense_last_blocks": (-1, "dense_last_blocks must be an integer >= 0"),
    "audit_rows": (True, "audit_rows must be an integer >= 1"),
    "max_error": (1.0, r"max_error must be in \(0, 1\), got 1.0"),
    "k_min": (1.5, "k_min must be an integer >= 0"),
    "streaming_blocks": (0, "streaming_blocks must be an integer >= 1"),
    "coverage": (0.0, r"coverage must be in \(0, 1\]"),
    "gamma": (1.01, r"gamma must be in \(0, 1\]"),
    "coverage_min": (1.5, r"coverage_min must be in \[0, 1\]"),
    "min_budget": (0, "min_budget must be an integer >= 1"),
    "vertical_tokens": (0, "vertical_tokens must be an integer >= 1"),
    "slash_tokens": (2.5, "slash_tokens must be an integer >= 1"),
    "stride": (12, "stride must be 8 or 16"),
    "threshold": (0, r"threshold must be in \(0, 1\]"),
    "tau": (-0.1, r"tau must be in \[0, 1\]"),
    "max_uncovered": ("half", r"max_uncovered must be in \[0, 1\]"),
    "on_violation": ("stop", "on_violation must be one of dense, warn, raise"),
    "alpha": (float("inf"), "alpha must be a finite number above 0"),
    "kernel_options": ({"BACKEND": "FLASH"}, "use backend= to choose the kernel"),
    "overrides": ({"layers.0": {"polcy": "dense"}}, r"\['polcy'\] cannot be set per site"),
}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(CrispConfig)])
def test_a_wrong_value_is_refused_by_name(name):
    value, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        CrispConfig(**{name: value})


def test_presets_differ_only_in_the_audit():
    fast, accurate = CrispConfig.preset("fast"), CrispConfig.preset("accurate", min_seqlen=64)
    assert CrispConfig.preset("balanced") == CrispConfig()
    assert (fast.coverage, fast.coverage_reduce) == (0.8, "min")
    assert (accurate.coverage, accurate.min_seqlen) == (0.95, 64)
    with pytest.raises(ConfigError, match="preset must be one of fast, balanced, accurate"):
        CrispConfig.preset("quick")


def test_options_may_name_a_preset_and_fields():
    config = CrispConfig.from_options({"preset": "fast", "min_seqlen": 256})
    assert config == CrispConfig.preset("fast", min_seqlen=256)
    with pytest.raises(ConfigError, match=r"unknown option \['blocksize'\]"):
        CrispConfig.from_options({"blocksize": 128})


def test_the_most_specific_override_wins():
    config = CrispConfig(
        overrides={
            "model.layers.1": {"policy": "dense"},
            "model": {"policy": "streaming", "coverage": 0.5},
            1: {"coverage": 0.99},
        }
    )
    assert config.for_site(0, "model.layers.0.self_attn").policy == "streaming"
    assert config.for_site(0, "model.layers.10.self_attn").policy == "streaming"
    site = config.for_site(1, "model.layers.1.self_attn")
    assert (site.policy, site.coverage) == ("dense", 0.99)
    assert config.for_site(0, "other") is config


def test_an_override_is_checked_when_the_config_is_made():
    with pytest.raises(ConfigError, match=r"overrides\[3\]: coverage must be in"):
        CrispConfig(overrides={3: {"coverage": 2}})
    with pytest.raises(ConfigError, match="a key is a site index or a module path"):
        CrispConfig(overrides={1.5: {"coverage": 0.5}})
