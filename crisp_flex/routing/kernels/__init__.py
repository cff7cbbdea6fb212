"""Triton kernels of crisp_flex::route, a file a stage; imported only when a CUDA call runs."""
