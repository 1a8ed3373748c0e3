"""The unmodified torch_npu wheel on a machine without an NPU: tensors with a literal device='npu', run by CPU twins.

stubs.py builds empty CANN libraries (device memory is host memory), runtime.py loads torch_npu on them, and the
SimulatedNpu of device.py is a dispatch mode that executes every operator on npu tensors: aten on the CPU, npu:: by the
twins, whose result is compared with torch_npu's own meta kernel. graph.py emulates capture, replay and task updates,
collectives.py runs HCCL groups over gloo. What this proves and what only hardware can show is listed in docs/ascend.md.
"""
