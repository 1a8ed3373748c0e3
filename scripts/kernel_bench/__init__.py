"""What scripts/bench_kernels.py times: linears, stages, heads, steps, one module each.

Importing its modules needs Triton; running them needs a CUDA device.
"""
