"""Config files: data in, a CrispConfig out, and one sentence where they are wrong."""

import doctest
import importlib

import pytest

import crisp_flex
from crisp_flex import (
    ConfigError,
    CrispConfig,
    block_lists,
    config_file,
    explanation,
    record_audit,
    record_table,
    uncovered,
)


def test_a_file_is_the_config_that_it_spells(tmp_path):
    file = tmp_path / "crisp.toml"
    file.write_text(
        'preset = "fast"\nblock_size = [64, 64]\n[overrides."model.layers.0"]\nenabled = false\n'
        "[overrides.3]\nblock_size = [128, 128]\n"
    )
    assert CrispConfig.load(file) == CrispConfig.preset(
        "fast",
        block_size=(64, 64),
        overrides={"model.layers.0": {"enabled": False}, 3: {"block_size": (128, 128)}},
    )
    file.write_text(config_file.dump({"preset": "accurate", "block_size": (128, 64)}))
    assert CrispConfig.load(file) == CrispConfig.preset("accurate", block_size=(128, 64))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('polcy = "dense"', r"crisp.toml: unknown option \['polcy'\]; CrispConfig has"),
        ('policy = "hybird"', "crisp.toml: policy must be one of hybrid"),
        ("policy = hybrid", 'is no TOML .*: write lines such as preset = "fast"'),
        ("overrides = 3", "crisp.toml: overrides must be a dict"),
    ],
    ids=["unknown key", "unknown policy", "no TOML", "wrong type"],
)
def test_a_wrong_file_is_one_sentence_that_names_it(tmp_path, text, says):
    file = tmp_path / "crisp.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        crisp_flex.compile(lambda x: x, config=file)


def test_a_missing_file_and_a_dict_say_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the config file .*No such file"):
        CrispConfig.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"got dict: .* CrispConfig.from_options\("):
        crisp_flex.compile(lambda x: x, config={"policy": "dense"})


# crisp_flex.explain and crisp_flex.record are functions
MODULES = [
    block_lists,
    config_file,
    importlib.import_module("crisp_flex.explain"),
    explanation,
    importlib.import_module("crisp_flex.record"),
    record_audit,
    record_table,
    uncovered,
]


@pytest.mark.parametrize(
    "module",
    MODULES,
    ids=lambda module: module.__name__,
)
def test_examples_in_docstrings_are_exact(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
