"""The commands about how fast steps are: predicted, measured, and tuned to a model and a device."""
