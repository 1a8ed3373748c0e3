"""`lopa quantize`: a model's 8-bit folder, the prompts that calibrate it, and what it costs against the float model."""
