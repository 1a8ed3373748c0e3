"""What clients get: bodies and streams of events, made from what the engine tells of their requests."""
