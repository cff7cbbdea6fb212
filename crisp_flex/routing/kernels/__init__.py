"""Triton kernels of policy "hybrid", a file a stage; imported only when a CUDA call takes them."""
