"""The engine's side of the server: the loop that takes requests from the front end, and what it counts."""
