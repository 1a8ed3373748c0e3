"""What the Ascend engine's host does between a plan and its pass: rows are laid out over pages, padded and copied."""

from __future__ import annotations

import time

import torch

from common.bench import HostSizes
from common.decoding import StepPlan, rows_by_rank
from common.runtime import PagePool
from graphs.buckets import round_up
from lopa_ascend.kv import PageBook, pages_for
from lopa_ascend.steps import Sizes, StepBuffers, lay_out, most_reads, pad


class Host:
    """`common.bench.EngineHost`; passes are padded as captured ones are, to any size."""

    def __init__(self, sizes: HostSizes) -> None:
        self._num_ranks = sizes.num_ranks
        pages, most = pages_for(sizes.longest), sizes.rows_of_rank * sizes.longest
        self._book = PageBook(PagePool(sizes.rows_of_rank * pages + 64))
        self._buffers = StepBuffers(Sizes(most + 64, most // 32 + 64, pages, most), torch.device("cpu"))

    def launch(self, plan: StepPlan) -> float:
        began = time.perf_counter()
        rows_of = rows_by_rank(plan, self._num_ranks)
        most_reads(plan, rows_of)
        flat = lay_out(plan, rows_of[0], self._book)
        num_rows = round_up(len(flat.query_ends) + 1, 8)
        num_tokens = round_up(flat.num_tokens + num_rows - len(flat.query_ends), 16)
        self._buffers.fill(pad(flat, num_tokens, num_rows, self._book))
        took = time.perf_counter() - began
        self._book.prepare_commits(plan)
        return took

    def commit(self) -> float:
        began = time.perf_counter()
        self._book.commit()
        return time.perf_counter() - began
