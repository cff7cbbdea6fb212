"""Which KV blocks each query block attends to."""
