"""The exceptions a user can see, under one base class."""

from __future__ import annotations


class CrispFlexError(Exception):
    """Base of every error that crisp_flex raises on purpose."""


class ConfigError(CrispFlexError, ValueError):
    """A configuration value or option is unknown or out of range."""


class InputError(CrispFlexError, ValueError):
    """Tensors handed to a crisp_flex function have shapes, dtypes or devices it cannot take."""


class UnavailableError(CrispFlexError, RuntimeError):
    """Something was asked for by name that this machine does not have."""


class UncoveredError(CrispFlexError, RuntimeError):
    """A head leaves out more attention mass than max_uncovered, with on_violation="raise"."""


class UncoveredWarning(UserWarning):
    """A head leaves out more attention mass than max_uncovered, with on_violation="warn"."""


class FallbackWarning(UserWarning):
    """Something on this machine is missing or broken, so a slower path gives the same result."""
