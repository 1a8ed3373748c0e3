"""`lopa estimate`: how long one step takes on hardware that need not be at hand, and what bounds it.

    profile + run -> Setup -> record (the model on meta tensors) -> operations -> cost (roofline) -> tables

The model that is recorded is the one that runs (common.model.decoder); the hardware is a file of configs/hardware, in
which every figure says where it comes from.
"""
