"""The front end: a process that speaks HTTP and knows texts, while the engine's knows tokens. Nothing of the engine's
process imports it, so that all else works without the extra `server`.
"""
