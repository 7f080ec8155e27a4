"""GPU kernels in Triton, which CUDA builds of PyTorch bring along; each file is imported only where there is a GPU.

Who uses a kernel asks for Triton first, and takes PyTorch's general operations where there is none, where a kernel does
not compile, and for what a kernel cannot take.
"""
