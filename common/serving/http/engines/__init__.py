"""The engines as the front end sees them."""
