"""`crisp-flex explain`: explain for a model by its path or id."""

from __future__ import annotations

import argparse
import dataclasses
import json

import torch

from crisp_flex.config import CrispConfig
from crisp_flex.demo.model import load
from crisp_flex.demo.run import DemoOptions, device_and_dtype
from crisp_flex.demo.screen import step, write
from crisp_flex.errors import ConfigError
from crisp_flex.explain import explain


def run(arguments: argparse.Namespace) -> None:
    """Load the model, trace a prompt, write what was found to stdout.

    Raises:
        DemoError: The model or the device is not there.
        ConfigError: A value is out of range.
        CrispFlexError: The HTML file cannot be written.
    """
    if arguments.length < 1:
        raise ConfigError(f"--length is {arguments.length}; it must be a number of tokens above 0")
    if arguments.html is not None and not arguments.html.absolute().parent.is_dir():
        raise ConfigError(f"--html is {arguments.html}: there is no such folder to write it to")
    config = CrispConfig.load(arguments.config) if arguments.config else CrispConfig()
    if arguments.min_seqlen is not None:
        config = dataclasses.replace(config, min_seqlen=arguments.min_seqlen)
    device, dtype = device_and_dtype(DemoOptions(device=arguments.device, dtype=arguments.dtype))
    model = load(arguments.model, device=device, dtype=dtype, cache=arguments.cache).model
    prompt = torch.zeros(1, arguments.length, dtype=torch.long, device=model.device)
    with step("tracing the prompt step"), torch.no_grad():
        found = explain(model, prompt, config=config)
    write(json.dumps(found.to_dict()) if arguments.json else str(found))
    if arguments.html is not None:
        found.save_html(arguments.html)
