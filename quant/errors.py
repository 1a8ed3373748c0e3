"""The one error of this package that users see."""


class QuantizationError(ValueError):
    """A model, folder or setting cannot be quantized or read; the message says what, where and what to do."""
