"""What a trainer's calls are told of several replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.decoding import DropWeights, PutWeights, ReadWeights
from common.serving.http.errors import ApiError
from common.serving.http.rollouts.asking import Rollouts
from common.serving.messages import Obeyed

DONE, FULL = Obeyed("", None, 400, "1"), Obeyed("", "not all free", 503, "0")


class Replicas:
    """Two replicas that answer as they were told to."""

    def __init__(self, **answers: tuple[Obeyed | None, ...]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def ask(self, what: Any, key: str, *, is_aborting: bool = False, to: Any = None) -> dict[int, Obeyed | None]:
        self.asked.append(type(what).__name__)
        return dict(enumerate(self.answers.get(type(what).__name__, (DONE, DONE))))


def replaced(replicas: Replicas, folder: str = ".") -> str:
    return asyncio.run(Rollouts(replicas).replace(folder, None, is_aborting=True))  # type: ignore[arg-type]


def test_a_folder_that_is_not_there_aborts_nothing() -> None:
    replicas = Replicas()
    with pytest.raises(ApiError, match="model_path: none: no such folder"):
        replaced(replicas, "none")
    assert not replicas.asked


def test_weights_of_all_replicas_are_told_of() -> None:
    assert replaced(Replicas()) == replaced(Replicas(PutWeights=(None, DONE))) == "1"


@pytest.mark.parametrize("put", [(DONE, FULL), (FULL, DONE), (FULL, None)])
def test_a_replica_that_could_not_put_them_in_force_is_told_of(put: tuple[Obeyed | None, ...]) -> None:
    with pytest.raises(ApiError, match="not all free") as refused:
        replaced(Replicas(PutWeights=put))
    assert refused.value.status == 503


def test_what_one_replica_cannot_read_all_drop() -> None:
    replicas = Replicas(ReadWeights=(DONE, FULL))
    with pytest.raises(ApiError, match="not all free"):
        replaced(replicas)
    assert replicas.asked == [ReadWeights.__name__, DropWeights.__name__]
    replicas = Replicas(PutWeights=(None, None))
    with pytest.raises(ApiError, match="has ended meanwhile"):
        replaced(replicas)
    assert replicas.asked == [ReadWeights.__name__, PutWeights.__name__]
