"""What a pass predicts of classes of tokens, for answers that are held to a format."""

from common.runtime.classes.head import ClassHead, Reduce
from common.runtime.classes.tiles import Tiles, class_statistics

__all__ = ["ClassHead", "Reduce", "Tiles", "class_statistics"]
