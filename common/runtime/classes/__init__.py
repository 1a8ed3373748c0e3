"""What a pass predicts of classes of tokens, for answers that are held to a format."""
