"""What a running engine holds in its device's memory, and how that changes while nothing is decoded.

Weights are replaced in place: other ones are read into the host's memory by the same code as at a start, so that a
folder that does not fit changes nothing; then they go to the device part by part, are quantized and laid out there as
at a start, and are copied over the old. Captured graphs hold addresses, which stay.

Where a layout may not be written to, other tensors take the places of the old; and memory that is given back is not at
its addresses when it is taken again. Then captured graphs are given back too, and captured anew once all is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

import torch
from torch import Tensor, nn

from common.checkpoint import existing_folder, load_model_config
from common.decoding import (
    FIRST_VERSION,
    DropWeights,
    Order,
    PutWeights,
    ReadWeights,
    ReleaseMemory,
    ResumeMemory,
    Tag,
    TakeMemory,
)
from common.errors import ConfigError, EngineError, is_out_of_memory, one_line
from common.model import Decoder
from common.runtime.memory import return_free_memory
from common.runtime.weights.load import ModelLoader, Origin
from common.runtime.weights.schemes import linear_schemes
from quant.errors import QuantizationError

logger = logging.getLogger(__name__)
_HOST = torch.device("cpu")
_OF_THE_START = ("mask_token_id", "eos_token_id", "stop_token_ids")  # decoding goes by these


class Holdings:
    """The weights and the KV memory of an engine.

    kv: its tensors. forget_graphs: frees what is captured; capture: captures it again. version: of the weights in
    force. released: what has been given back.
    """

    def __init__(
        self, model: Decoder, loader: ModelLoader, kv: Iterable[Tensor], forget_graphs: Callable[[], None],
        capture: Callable[[], None],
    ) -> None:  # fmt: skip
        self.version = FIRST_VERSION
        self.released: frozenset[Tag] = frozenset()
        self._model, self._loader = model, loader
        self._kv = [*kv]
        self._forget_graphs, self._capture = forget_graphs, capture
        self._origin: Origin | None = loader.origin  # None: memory of whoever called
        self._read: tuple[Decoder, Origin] | None = None
        self._num_bytes: dict[Tensor, int] = {}  # of storages that have been given back, by a tensor of each

    def obey(self, order: Order) -> None:
        """Carry an order out. Raises ConfigError, with nothing changed, where it cannot be."""
        if isinstance(order, ReadWeights):
            self._read = self._read_from(order.source)
            self._take({"weights"})
        elif isinstance(order, PutWeights):
            self._put(order.version)
        elif isinstance(order, DropWeights):
            self._drop()
        elif isinstance(order, ReleaseMemory):
            self._release(set(order.tags) - self.released)
        elif isinstance(order, TakeMemory):
            self._take_again(self.released & set(order.tags))
        elif isinstance(order, ResumeMemory):
            self._resume(self.released & set(order.tags))

    def _read_from(self, source: str | Mapping[str, Tensor] | Origin) -> tuple[Decoder, Origin]:
        """source: an Origin is one whose weights have been in force."""
        try:
            if isinstance(source, Origin):
                origin = source
            elif isinstance(source, str):
                origin = Origin(source)
                self._check_folder(source)
            else:
                origin = Origin("", tensors=source)
            self._check_schemes(origin)
            return self._loader.read(origin, _HOST), origin
        except (QuantizationError, EngineError) as error:
            raise ConfigError(str(error)) from error

    def _check_folder(self, folder: str) -> None:
        """Raise ConfigError for a folder of another model than the one that runs."""
        loader = self._loader
        existing_folder(folder, "model_path")
        found, ours = asdict(load_model_config(folder)), asdict(loader.checkpoint_config)
        other = [name for name in ours if name not in _OF_THE_START and found[name] != ours[name]]
        if other:
            name = other[0]
            raise ConfigError(
                f"{folder}/config.json: {name} is {found[name]} there and {ours[name]} in the model that runs: give "
                "weights of the same model, or start it anew"
            )

    def _check_schemes(self, origin: Origin) -> None:
        """Raise ConfigError for weights whose linears would lie in memory in another form than those of the start."""
        if self._schemes_of(origin) != self._schemes_of(self._loader.origin):
            raise ConfigError(
                f"{origin.folder or 'the given tensors'}: linears would not be quantized as those of "
                f"{self._loader.origin.folder} are, with which this engine was started: give a folder that was "
                "quantized alike, or start anew"
            )

    def _schemes_of(self, origin: Origin) -> dict[str, str]:
        load_format = "auto" if origin.is_quantized else "dummy"  # a float's are by the profile alone
        return linear_schemes(self._loader.profile, origin.folder, self._loader.checkpoint_config, load_format)

    @torch.no_grad()
    def _put(self, version: str | None) -> None:
        assert self._read is not None, "weights are read first"
        (read, origin), self._read = self._read, None
        can_write = all(map(self._loader.can_write, self._tensors_of("weights")))
        if not can_write:
            self._forget_graphs()
        layers, live_layers = read.layers, self._model.layers
        read.layers = nn.ModuleList()
        for index in range(len(layers)):
            self._put_part(layers[index], live_layers[index], origin)
            layers[index] = nn.Identity()
        self._put_part(read, self._model, origin)
        if version is None:
            version = str(int(self.version) + 1) if self.version.isdecimal() else f"{self.version}+1"
        self.version = version
        self._origin = None if origin.tensors is not None else origin
        del read, layers
        return_free_memory(self._loader.device)
        logger.info("%s", one_line(f"weights of version {self.version} are in force, from {origin.folder or 'memory'}"))
        was_whole = not self.released
        self._go_on({"weights"})
        if was_whole and not can_write:
            self._capture()

    def _put_part(self, part: nn.Module, live: nn.Module, origin: Origin) -> None:
        part.to(self._loader.device)
        self._loader.complete(part, origin)
        ours = _tensors(live)
        for name, tensor in _tensors(part).items():
            if not self._loader.can_write(tensor):
                _set(live, name, tensor)
                continue
            assert ours[name].shape == tensor.shape, f"{name} is laid out as at the start"
            ours[name].copy_(tensor)

    def _drop(self) -> None:
        """Forget what was read, and free what was taken and is not in use."""
        self._read = None
        for tensor in (tensor for tag in self.released for tensor in self._tensors_of(tag)):
            self._give_back(tensor)
        return_free_memory(self._loader.device)

    def _release(self, tags: set[Tag]) -> None:
        self._drop()
        if tags:
            self._forget_graphs()
        for tensor in (tensor for tag in tags for tensor in self._tensors_of(tag)):
            self._give_back(tensor)
        if "weights" in tags:
            for name, tensor in _tensors(self._model).items():
                if not self._loader.can_write(tensor):
                    _set(self._model, name, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
        self.released |= tags
        return_free_memory(self._loader.device)

    def _take_again(self, tags: frozenset[Tag]) -> None:
        if "weights" in tags:
            if self._origin is None:
                raise ConfigError(
                    "the weights came from memory and were not kept: update them instead, which takes their memory too"
                )
            self._read = self._read_from(self._origin)
        self._take(tags)

    def _resume(self, tags: frozenset[Tag]) -> None:
        if "kv_cache" in tags:
            for tensor in self._kv:
                tensor.zero_()
        if "weights" in tags:
            self._put(self.version)
        self._go_on(tags)

    def _go_on(self, tags: Iterable[Tag]) -> None:
        was_released, self.released = self.released, self.released.difference(tags)
        if was_released and not self.released:
            self._capture()

    def _tensors_of(self, tag: Tag) -> list[Tensor]:
        return self._kv if tag == "kv_cache" else [*_tensors(self._model).values()]

    def _give_back(self, tensor: Tensor) -> None:
        """Free a tensor's storage, which views and modules keep."""
        if not self._loader.can_write(tensor):
            return
        storage = tensor.untyped_storage()
        if not storage.resizable():  # a file's
            tensor.data = tensor.data.clone()
            storage = tensor.untyped_storage()
        if storage.nbytes():
            self._num_bytes[tensor] = storage.nbytes()
            storage.resize_(0)

    def _take(self, tags: Iterable[Tag]) -> None:
        """Give storages that were freed their memory again. Raises ConfigError, with all as it was and nothing read,
        where there is too little."""
        tensors = [tensor for tag in tags for tensor in self._tensors_of(tag) if tensor in self._num_bytes]
        needed = sum(self._num_bytes[tensor] for tensor in tensors)
        try:
            for tensor in tensors:
                tensor.untyped_storage().resize_(self._num_bytes[tensor])
        except RuntimeError as error:
            self._drop()
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{needed / 2**30:.1f} GiB were given back and are not all free on {self._loader.device} now: free "
                "what other processes hold, and resume again"
            ) from error
        for tensor in tensors:
            del self._num_bytes[tensor]


def _set(part: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer."""
    owner, _, leaf = name.rpartition(".")
    module = part.get_submodule(owner)
    is_parameter = leaf in dict(module.named_parameters(recurse=False))
    setattr(module, leaf, nn.Parameter(tensor.data, requires_grad=False) if is_parameter else tensor)


def _tensors(part: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers alike, which a layout may turn into each other."""
    return {**dict(part.named_parameters()), **dict(part.named_buffers())}
