"""Static shapes for the device: which padded sizes steps are run at, and how work at one size is captured and replayed.

`buckets` is pure arithmetic, `runner` knows no vendor, `cuda` and `npu` capture. Nothing here knows what the work is.
"""
