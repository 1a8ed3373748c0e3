"""Pages of KV memory: which are free, whose the others are, and how many requests fit. Host bookkeeping, no tensors.

A page is a fixed number of positions of one request, in all layers. An engine knows from the plan alone who has come
and who has gone: all requests that are being decoded are in every plan, and one at its first step is new in its slot.
"""
