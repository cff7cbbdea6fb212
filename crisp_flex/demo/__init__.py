"""The demo: a small real model answers a long prompt dense and sparse, and both are compared."""
