"""Programs that a model has written: from an answer to a program, and from a program to what it yields or whether it
passes its tests. Each runs in a cell."""
