"""Formats of answers: automata over tokens, made of a schema, a regular expression or a list of texts. No torch."""

from common.constraints.apart import made_apart
from common.constraints.automaton import MASK, NEVER, Automaton, Graph
from common.constraints.compiler import Compiler
from common.constraints.formats import Format, of_calls, of_response_format, of_structured_outputs
from common.constraints.lift import ByteAutomaton, Trie, lift
from common.constraints.making import made
from common.constraints.recent import Recent

__all__ = [
    "MASK",
    "NEVER",
    "Automaton",
    "ByteAutomaton",
    "Compiler",
    "Format",
    "Graph",
    "Recent",
    "Trie",
    "lift",
    "made",
    "made_apart",
    "of_calls",
    "of_response_format",
    "of_structured_outputs",
]
