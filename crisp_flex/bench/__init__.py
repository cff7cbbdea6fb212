"""Measuring attention on this machine, for `crisp-flex bench` and for benchmarks/."""
