"""What clients ask for: fields of a body, prompts as token ids, and orders for the engine."""
