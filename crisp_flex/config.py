"""CrispConfig: what to route and when; the only place with defaults."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from crisp_flex.errors import ConfigError

Policy = Literal[
    "hybrid",
    "bounded",
    "crisp",
    "streaming",
    "dense",
    "flexprefill",
    "minference",
    "xattention",
    "oracle",
]
Backend = Literal["auto", "flash", "triton"]

POLICIES = get_args(Policy)
ROUTERS = ("c_struct", "jsd", "vs", "pe")
BACKENDS = ("auto", "flash", "triton")
# What None in `block_size` and `min_seqlen` means where gpu_table knows nothing better.
BLOCK_SIZE = (128, 128)
MIN_SEQLEN = 8192

# Chosen by density and KL(dense || sparse) on SmolLM2-135M at 8k, Gemma 3 270M at 16k and
# Qwen2.5-Coder-0.5B at 32k tokens, code and prose (H200, 2026-11).
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fast": {"coverage": 0.8, "coverage_reduce": "min"},
    "balanced": {"coverage": 0.9, "coverage_reduce": "mean"},
    "accurate": {"coverage": 0.95, "coverage_reduce": "mean"},
}

# Settled once per compiled graph, so they cannot differ between the sites of one graph.
_WHOLE_GRAPH = frozenset({"overrides"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CrispConfig:
    """What to route and when.

    Args:
        policy: Which blocks are kept: "hybrid" (two views, one audited floor), "bounded" (the
            blocks of least estimated mass go, as many as an audit of the attention output allows),
            "crisp" (the paper's algorithm), "streaming" (sinks and recency), "dense" (all causal
            blocks), or a baseline for comparisons, without kernels of its own: "flexprefill",
            "minference", "xattention" or "oracle".
        enabled: False leaves the call as it was (of use in `overrides`).
        block_size: (query, key) tokens per block, each a power of two in [16, 512]; None is
            (128, 128), or (128, 64) for D 256 where FLASH takes the call with it.
        min_seqlen: Tokens of the shortest prompt that is not left to dense SDPA, at least 1; None
            is the length from which sparse was measured to pay on this GPU (gpu_table), else 8192.
            A later chunk is sparse if it is as much work (visible pairs) and has 8 query blocks.
        dense_last_blocks: Query blocks at the end that keep all visible blocks. At least 0.
        coverage: hybrid: exact attention mass to reach on the audited rows; oracle: mass of each
            query block that is kept; in (0, 1].
        coverage_min: hybrid: mass that each audited row must reach besides, in [0, 1]; 0 switches
            it off. Above 0 selection runs as the eager reference.
        coverage_reduce: hybrid: "mean" or "min" over the audited rows.
        audit_rows: hybrid, bounded: number of audited query blocks, at least 1.
        max_error: bounded: largest error of the attention output on the audited rows, relative to
            the mean head of the layer (the root mean square over its heads), in (0, 1).
        router: crisp: "c_struct", "jsd", "vs" or "pe".
        alpha: crisp: multiple of the sink-aware noise floor, above 0.
        tau: crisp: c_struct from which on a head is routed to verticals and slashes, in [0, 1].
        k_min: crisp: least number of lines per direction, at least 0.
        gamma: crisp: attention mass that a pooled-estimate head keeps; flexprefill: mass that
            sets its budgets (FlexPrefill, arXiv 2502.20766); in (0, 1].
        min_budget: flexprefill: least tokens of lines per direction, at least 1 (the same).
        vertical_tokens, slash_tokens: minference: tokens of lines kept per direction, each at
            least 1 (vertical-slash heads of MInference, arXiv 2407.02490).
        stride: xattention: tokens between sampled antidiagonals, 8 or 16 (arXiv 2503.16428).
        threshold: xattention: estimated mass kept of each row, in (0, 1] (the same).
        streaming_blocks: streaming: block diagonals kept, at least 1.
        max_uncovered: Attention mass that a head may leave out on the rows that were measured (the
            audited rows, or the proxy rows of policies without an audit), in [0, 1].
        on_violation: What happens above max_uncovered. "dense": a head of a policy without an audit
            keeps all blocks (hybrid reaches its coverage and bounded stays within its error, or
            they keep all, anyway); decided on the device. "warn": an UncoveredWarning, and the head
            stays as it is. "raise": an UncoveredError. The last two read one number per attention
            call back: the host waits.
        backend: FlexAttention kernel on CUDA: "auto" (FLASH where it runs, else TRITON), "flash" or
            "triton". With "flash" the package must be there; a site that it cannot take (fp32, most
            D above 128, padding) still runs on TRITON, as the report says. The CPU always takes
            Inductor's C++ kernel.
        kernel_options: Passed to FlexAttention on top of our own choice, e.g. {"BLOCK_M": 64}.
        overrides: Changes by site: the key is a site index in the graph (int) or the path of the
            module that makes the call, or of one of its parents, as `model.named_modules()`
            spells it ("model.layers.3" covers the attention inside); the value maps field
            names to values. Of several keys that match a site the longest path wins, and an
            index wins over a path.

    Raises:
        ConfigError: A value is out of range, or an override names an unknown field.
    """

    policy: Policy = "hybrid"
    enabled: bool = True
    block_size: tuple[int, int] | None = None
    min_seqlen: int | None = None
    dense_last_blocks: int = 1
    coverage: float = 0.9
    coverage_reduce: Literal["mean", "min"] = "mean"
    coverage_min: float = 0.0
    audit_rows: int = 4
    max_error: float = 0.13
    router: Literal["c_struct", "jsd", "vs", "pe"] = "c_struct"
    alpha: float = 1.0
    tau: float = 0.2
    k_min: int = 8
    gamma: float = 0.95
    min_budget: int = 1024
    vertical_tokens: int = 1000
    slash_tokens: int = 6096
    stride: int = 16
    threshold: float = 0.9
    streaming_blocks: int = 8
    max_uncovered: float = 0.5
    on_violation: Literal["dense", "warn", "raise"] = "dense"
    backend: Backend = "auto"
    kernel_options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[int | str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every value; the messages say what, where and what to do."""
        _one_of("policy", self.policy, POLICIES)
        _one_of("router", self.router, ROUTERS)
        _one_of("backend", self.backend, BACKENDS)
        _one_of("coverage_reduce", self.coverage_reduce, ("mean", "min"))
        _one_of("on_violation", self.on_violation, ("dense", "warn", "raise"))
        if not isinstance(self.enabled, bool):
            raise ConfigError(f"enabled must be True or False, got {self.enabled!r}")
        if self.block_size is not None:
            object.__setattr__(self, "block_size", _two_sizes(self.block_size))
        for name, least in (
            ("min_seqlen", 1),
            ("dense_last_blocks", 0),
            ("audit_rows", 1),
            ("k_min", 0),
            ("streaming_blocks", 1),
            ("min_budget", 1),
            ("vertical_tokens", 1),
            ("slash_tokens", 1),
        ):
            value = getattr(self, name)
            if name == "min_seqlen" and value is None:
                continue
            if not _is_int(value) or value < least:
                raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}")
        for name in ("coverage", "gamma", "threshold"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value <= 1:
                raise ConfigError(f"{name} must be in (0, 1], got {value!r}")
        if not _is_number(self.max_error) or not 0 < self.max_error < 1:
            raise ConfigError(f"max_error must be in (0, 1), got {self.max_error!r}")
        for name in ("tau", "max_uncovered", "coverage_min"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {value!r}")
        if not _is_int(self.stride) or self.stride not in (8, 16):
            raise ConfigError(f"stride must be 8 or 16, got {self.stride!r}")
        if not _is_number(self.alpha) or not 0 < self.alpha < float("inf"):
            raise ConfigError(f"alpha must be a finite number above 0, got {self.alpha!r}")
        _check_kernel_options(self.kernel_options)
        if not isinstance(self.overrides, Mapping):
            raise ConfigError(
                'overrides must be a dict such as {"model.layers.0": {"enabled": False}}, got '
                f"{self.overrides!r}"
            )
        for key, changes in self.overrides.items():
            self._check_override(key, changes)

    def _check_override(self, key: object, changes: Mapping[str, Any]) -> None:
        if not isinstance(key, str) and not _is_int(key):
            raise ConfigError(f"overrides: a key is a site index or a module path, got {key!r}")
        if not isinstance(changes, Mapping):
            raise ConfigError(
                f'overrides[{key!r}] must be a dict such as {{"enabled": False}}, got {changes!r}'
            )
        unknown = set(changes) - set(field_names()) | set(changes) & _WHOLE_GRAPH
        if unknown:
            raise ConfigError(
                f"overrides[{key!r}]: {sorted(unknown)} cannot be set per site; "
                f"choose from {sorted(set(field_names()) - _WHOLE_GRAPH)}"
            )
        try:
            dataclasses.replace(self, overrides={}, **changes)
        except ConfigError as error:
            raise ConfigError(f"overrides[{key!r}]: {error}") from error

    @classmethod
    def preset(cls, name: str, **changes: Any) -> CrispConfig:  # noqa: ANN401
        """The settings of a preset, with changes on top.

        Args:
            name: "fast", "balanced" (the defaults) or "accurate".
            **changes: Fields of CrispConfig.

        Raises:
            ConfigError: The preset, or a field, does not exist, or a value is out of range.
        """
        _one_of("preset", name, tuple(PRESETS))
        return cls.from_options({**PRESETS[name], **changes})

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> CrispConfig:
        """A config from plain data such as `torch.compile(options=...)`; "preset" may be among it.

        Raises:
            ConfigError: A key is no field of CrispConfig, or a value is out of range.
        """
        settings = dict(options)
        preset = settings.pop("preset", None)
        if preset is not None:
            return cls.preset(preset, **settings)
        unknown = set(settings) - set(field_names())
        if unknown:
            raise ConfigError(
                f"unknown option {sorted(unknown)}; CrispConfig has {sorted(field_names())}"
            )
        return cls(**settings)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CrispConfig:
        """The config in a TOML file.

        The file is data: keys are the fields of CrispConfig, and "preset"; see config_file.

        Args:
            path: The file.

        Raises:
            ConfigError: There is no such file, it is no TOML, or a key or value is wrong.
        """
        from crisp_flex.config_file import load

        return load(path)

    def settled(self, *, block_size: tuple[int, int], min_seqlen: int) -> CrispConfig:
        """This config with numbers where block_size and min_seqlen are None."""
        return dataclasses.replace(
            self,
            block_size=self.block_size or block_size,
            min_seqlen=self.min_seqlen or min_seqlen,
        )

    @property
    def tokens_per_block(self) -> tuple[int, int]:
        """block_size as numbers, (128, 128) where nothing was chosen."""
        return self.block_size or BLOCK_SIZE

    @property
    def least_tokens(self) -> int:
        """min_seqlen as a number, 8192 where nothing was chosen."""
        return self.min_seqlen or MIN_SEQLEN

    def for_site(self, index: int, module_path: str) -> CrispConfig:
        """This config with the overrides of one site applied.

        Args:
            index: Number of the SDPA call in its graph, from 0.
            module_path: Path of the module that makes the call, as `named_modules()` spells it.

        Returns:
            A config without overrides. Paths are applied from the shortest to the longest, the
            index last.
        """
        changes: dict[str, Any] = {}
        paths = sorted((k for k in self.overrides if isinstance(k, str)), key=len)
        for key in paths:
            if module_path == key or module_path.startswith(f"{key}."):
                changes.update(self.overrides[key])
        changes.update(self.overrides.get(index, {}))
        return dataclasses.replace(self, overrides={}, **changes) if changes else self


def field_names() -> tuple[str, ...]:
    """The fields of CrispConfig, which are also the options of the backend."""
    return tuple(f.name for f in dataclasses.fields(CrispConfig))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _two_sizes(given: object) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(sizes) != 2 or not all(
        _is_int(b) and 16 <= b <= 512 and b & (b - 1) == 0 for b in sizes
    ):
        raise ConfigError(
            "block_size must be two powers of two in [16, 512], (query, key), such as (128, 128); "
            f"got {given!r}"
        )
    return sizes


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_kernel_options(options: Mapping[str, Any]) -> None:
    owned = {"BACKEND", "OUTPUT_LOGSUMEXP", "OUTPUT_MAX", "IS_DIVISIBLE", "ROWS_GUARANTEED_SAFE"}
    taken = owned & set(options)
    if taken:
        raise ConfigError(
            f"kernel_options: {sorted(taken)} are set by crisp_flex (they follow from the block "
            "lists); use backend= to choose the kernel"
        )
