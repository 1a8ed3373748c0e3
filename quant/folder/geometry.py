"""The sizes that config.json promises, so that a wrong tensor is refused by name before it reaches a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.errors import QuantizationError
from quant.folder.tensors import read_json, shown

_LARGEST = 2**31
_MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True)
class Geometry:
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str  # the float model's, e.g. bfloat16
    is_tied: bool  # lm_head shares the embedding's weight and may be in no file

    def shape(self, part: str) -> tuple[int, int]:
        """Return [N, K] of a checkpoint linear by its last name, e.g. k_proj."""
        q, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        return {
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }[part]

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Refuse ranks over which heads, KV heads and the MLP do not split evenly. Raises QuantizationError."""
        sizes = {
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.intermediate,
        }
        for key, size in sizes.items():
            if tp_size < 1 or size % tp_size:
                raise QuantizationError(
                    f"{key} {size} does not split over {tp_size} ranks: change mesh.tensor_parallel_size"
                )


def read_geometry(folder: str | Path) -> Geometry:
    """Read the sizes. Raises QuantizationError naming file and key if config.json is unreadable or incomplete."""
    path = Path(folder) / "config.json"
    tree = read_json(path)
    hidden = _positive(tree, "hidden_size", path)
    num_heads = _positive(tree, "num_attention_heads", path)
    return Geometry(
        num_layers=_positive(tree, "num_hidden_layers", path, at_most=_MOST_LAYERS),
        hidden=hidden,
        intermediate=_positive(tree, "intermediate_size", path),
        num_heads=num_heads,
        num_kv_heads=_positive(tree, "num_key_value_heads", path, default=num_heads),
        head_size=_positive(tree, "head_dim", path, default=hidden // num_heads),
        dtype=str(tree.get("dtype") or tree.get("torch_dtype") or "bfloat16"),
        is_tied=bool(tree.get("tie_word_embeddings", False)),
    )


def _positive(tree: dict[str, Any], key: str, path: Path, default: int | None = None, at_most: int = _LARGEST) -> int:
    value = tree.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= at_most:
        raise QuantizationError(
            f"{path}: {key}: expected a positive number up to {at_most}, found {shown(value)}; correct config.json"
        )
    return value
