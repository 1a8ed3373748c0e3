"""The model in a device's memory: loaded, quantized, laid out; replaced, given back and taken again while it runs."""
