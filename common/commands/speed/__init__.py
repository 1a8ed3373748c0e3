"""The commands about how fast steps are before they are run: predicted, and tuned to a model and a device."""
