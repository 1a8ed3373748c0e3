"""Routes for whoever runs the server and trains the model meanwhile, named as SGLang names them."""

from common.serving.http.rollouts.routes import add_rollouts

__all__ = ["add_rollouts"]
