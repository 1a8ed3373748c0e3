"""Answers held to a format: from a schema, a regular expression or a list of texts to an automaton over tokens, and
from a pass's statistics to one token for every mask at once. No torch."""

from common.constraints.apart import made_apart
from common.constraints.automaton import MASK, NEVER, Automaton, Lattice
from common.constraints.compiler import Compiler
from common.constraints.formats import Format, of_response_format, of_structured_outputs
from common.constraints.joint import best_path, drawn_path, possible
from common.constraints.lift import ByteAutomaton, Trie, lift
from common.constraints.making import made

__all__ = [
    "MASK",
    "NEVER",
    "Automaton",
    "ByteAutomaton",
    "Compiler",
    "Format",
    "Lattice",
    "Trie",
    "best_path",
    "drawn_path",
    "lift",
    "made",
    "made_apart",
    "of_response_format",
    "of_structured_outputs",
    "possible",
]
