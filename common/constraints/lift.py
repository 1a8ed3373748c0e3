"""Make an automaton over a vocabulary's tokens of one over bytes.

The vocabulary is a trie of its tokens' bytes, walked once from each state, all branches at a time. Tokens that lead
from every state to the same next state become a class; 64-bit hashes tell their columns apart.

Shapes: S byte states, N trie nodes, V vocabulary, E edges (state, token), Q states, C classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from common.constraints.automaton import FAR, NEVER, Automaton, Bool, Int, Int32, distances, places
from common.errors import ConfigError

SIMPLER = "write it more simply, with shorter bounds or fewer values"
_STATES_AT_ONCE = 64
_MOST_EDGES = 100_000  # of state and class: each pass goes over them, at every open position
_MOST_CELLS = 2**22  # of states times classes, which go to the engine with a request


class ByteAutomaton(NamedTuple):
    """A deterministic automaton over bytes. next_S256: the next state, or NEVER."""

    next_S256: Int32
    is_final_S: Bool
    start: int

    @classmethod
    def of_texts(cls, texts: tuple[str, ...]) -> ByteAutomaton:
        """Return the automaton that accepts these texts and no other."""
        children: list[dict[int, int]] = [{}]
        finals = set()
        for text in texts:
            state = 0
            for byte in text.encode():
                if byte not in children[state]:
                    children[state][byte] = len(children)
                    children.append({})
                state = children[state][byte]
            finals.add(state)
        next_S256 = np.full((len(children), 256), NEVER, np.int32)
        for state, row in enumerate(children):
            for byte, target in row.items():
                next_S256[state, byte] = target
        is_final_S = np.zeros(len(children), np.bool_)
        is_final_S[list(finals)] = True
        return cls(next_S256, is_final_S, 0)


class Trie(NamedTuple):
    """A vocabulary by its bytes. Children of a node stand together, and so do the tokens that end at one."""

    first_child_N: Int
    num_children_N: Int
    byte_of_child: Int
    node_of_child: Int
    first_token_N: Int
    num_tokens_N: Int
    token_of_place: Int
    vocab_size: int
    key: str

    @classmethod
    def of(cls, bytes_of: Mapping[int, bytes], vocab_size: int) -> Trie:
        """Build it. bytes_of: of the tokens that texts may hold; an id beyond the vocabulary is left out."""
        given = sorted((text, id) for id, text in bytes_of.items() if text and id < vocab_size)
        texts = [text for text, _ in given]
        ids_V = np.array([id for _, id in given], np.int64)
        joined = np.frombuffer(b"".join(texts), np.uint8)
        length_V = np.array([len(text) for text in texts], np.int64)
        begin_V = length_V.cumsum() - length_V
        node_V = np.zeros(len(texts), np.int64)  # of the prefix so far
        parents, bytes_, nodes, num_nodes = [], [], [], 1
        end_V = np.zeros(len(texts), np.int64)
        place_V = np.arange(len(texts))
        for depth in range(int(length_V.max(initial=0))):
            place_V = place_V[length_V[place_V] > depth]
            byte_V, parent_V = joined[begin_V[place_V] + depth].astype(np.int64), node_V[place_V]
            is_first_V = np.r_[True, (byte_V[1:] != byte_V[:-1]) | (parent_V[1:] != parent_V[:-1])]
            node_V[place_V] = num_nodes + is_first_V.cumsum() - 1
            parents.append(parent_V[is_first_V])
            bytes_.append(byte_V[is_first_V])
            nodes.append(node_V[place_V][is_first_V])
            num_nodes += int(is_first_V.sum())
            is_last_V = length_V[place_V] == depth + 1
            end_V[place_V[is_last_V]] = node_V[place_V[is_last_V]]
        parent_X = np.concatenate([np.zeros(0, np.int64), *parents])
        order_X, order_V = parent_X.argsort(kind="stable"), end_V.argsort(kind="stable")
        num_children_N = np.bincount(parent_X, minlength=num_nodes)
        num_tokens_N = np.bincount(end_V, minlength=num_nodes)
        digest = hashlib.blake2b(joined.tobytes() + ids_V.tobytes() + length_V.tobytes(), digest_size=16)
        return cls(
            num_children_N.cumsum() - num_children_N, num_children_N,
            np.concatenate([np.zeros(0, np.int64), *bytes_])[order_X],
            np.concatenate([np.zeros(0, np.int64), *nodes])[order_X],
            num_tokens_N.cumsum() - num_tokens_N, num_tokens_N, ids_V[order_V], vocab_size, digest.hexdigest(),
        )  # fmt: skip


def lift(byte_automaton: ByteAutomaton, trie: Trie) -> Automaton | None:
    """Return the automaton over tokens whose texts the byte automaton accepts; None if no text of tokens is. Raises
    ConfigError for one so large that passes would wait for it."""
    source_E, token_E, target_E, states = _token_edges(byte_automaton, trie)
    state_of = np.full(len(byte_automaton.next_S256), NEVER, np.int64)
    state_of[states] = np.arange(len(states))
    source_E, target_E = state_of[source_E], state_of[target_E]
    is_final_Q = byte_automaton.is_final_S[states]
    is_useful_Q = distances(source_E, target_E, is_final_Q) < FAR
    if not is_useful_Q[0]:
        return None
    is_kept_E = is_useful_Q[target_E] & is_useful_Q[source_E]
    source_E, token_E, target_E = source_E[is_kept_E], token_E[is_kept_E], target_E[is_kept_E]
    class_V, num_classes = _classes(source_E, token_E, target_E, len(states), trie.vocab_size)
    if len(states) * num_classes > _MOST_CELLS:
        raise ConfigError(
            f"it takes {len(states)} states and {num_classes} classes of tokens, together more than {_MOST_CELLS}: "
            + SIMPLER
        )
    next_QC = np.full((len(states), num_classes), NEVER, np.int32)
    next_QC[source_E, class_V[token_E]] = target_E
    num_edges = int((next_QC >= 0).sum())
    if num_edges > _MOST_EDGES:
        raise ConfigError(f"it takes {num_edges} edges, at most {_MOST_EDGES} are compiled: {SIMPLER}")
    digest = hashlib.blake2b(next_QC.tobytes() + is_final_Q.tobytes() + class_V.tobytes(), digest_size=16)
    return Automaton(class_V, next_QC, is_final_Q, 0, digest.hexdigest())


def _token_edges(automaton: ByteAutomaton, trie: Trie) -> tuple[Int, Int, Int, Int]:
    """State, token and next state of every edge from the states that are reached, and these, the first one first."""
    seen, todo = {automaton.start: None}, [automaton.start]  # in the order in which they are come to
    found: list[tuple[Int, Int, Int]] = [(np.zeros(0, np.int64),) * 3]
    while todo:
        part, todo = todo[:_STATES_AT_ONCE], todo[_STATES_AT_ONCE:]
        source_X = state_X = np.array(part, np.int64)
        node_X = np.zeros(len(part), np.int64)
        while len(node_X):
            count_X = trie.num_children_N[node_X]
            child_X = places(trie.first_child_N[node_X], count_X)
            source_X, state_X = source_X.repeat(count_X), state_X.repeat(count_X)
            state_X = automaton.next_S256[state_X, trie.byte_of_child[child_X]].astype(np.int64)
            is_on_X = state_X >= 0
            source_X, state_X, node_X = source_X[is_on_X], state_X[is_on_X], trie.node_of_child[child_X[is_on_X]]
            count_X = trie.num_tokens_N[node_X]
            token_E = trie.token_of_place[places(trie.first_token_N[node_X], count_X)]
            target_E = state_X.repeat(count_X)
            found.append((source_X.repeat(count_X), token_E, target_E))
            for state in np.bincount(target_E).nonzero()[0].tolist():
                if state not in seen:
                    seen[state] = None
                    todo.append(state)
    source_E, token_E, target_E = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return source_E, token_E, target_E, np.array([*seen], np.int64)


def _classes(source_E: Int, token_E: Int, target_E: Int, num_states: int, vocab_size: int) -> tuple[Int32, int]:
    """Return the class of each token, 0 for those without an edge, and the number of classes."""
    salts = np.random.default_rng(0).integers(1, 2**63, (2, num_states), dtype=np.uint64)
    hash_V = np.zeros(vocab_size, np.uint64)
    mixed_E = salts[0][source_E] * (salts[1][target_E] | np.uint64(1))
    mixed_E ^= mixed_E >> np.uint64(29)
    mixed_E *= np.uint64(0xBF58476D1CE4E5B9)
    np.add.at(hash_V, token_E, mixed_E ^ (mixed_E >> np.uint64(32)))
    has_edge_V = np.zeros(vocab_size, np.bool_)
    has_edge_V[token_E] = True
    hash_V[~has_edge_V] = 0
    _, class_V = np.unique(np.where(has_edge_V, hash_V | np.uint64(1), np.uint64(0)), return_inverse=True)
    if has_edge_V.all():
        class_V = class_V + 1
    return class_V.astype(np.int32), int(class_V.max()) + 1
