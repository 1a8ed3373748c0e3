"""How sure a prediction is: `confidence(Token)`, a number a position, computed on the device.

`default`, `margin` and `neg_entropy` are part of the head's kernels; others take plain operators, on `lopa_cuda`.
"""
