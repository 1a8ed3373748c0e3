"""What a pass predicts of classes of tokens, for answers that are held to a format."""

from common.runtime.classes.head import ClassHead, Reduce
from common.runtime.classes.tiles import Tiles, class_statistics, merge_classes

__all__ = ["ClassHead", "Reduce", "Tiles", "class_statistics", "merge_classes"]
