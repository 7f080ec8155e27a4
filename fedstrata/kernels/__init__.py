"""GPU kernels in Triton, which CUDA builds of PyTorch bring along; imported only where there is a GPU."""
