"""A quantized model beside the float one: do they predict the same tokens, and do they solve the same problems?

Agreement is measured on the float model's path: both see every step that it takes. Accuracy is each model's own, from
two ordinary batch runs over the run file's input.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.batch import accuracy, number, run_batch
from common.config import DeviceProfile, InputConfig, OutputConfig, RunConfig
from common.decoding import Engine, Int, Predictions, StepPlan, WrappedEngine
from common.generate import Generator, build_generator
from common.tables import markdown


class PairedEngine(WrappedEngine):
    """The first engine decides; the second computes the same steps and is compared with it."""

    def __init__(self, engine: Engine, other: Engine) -> None:
        super().__init__(engine)
        self._other = other
        self.num_compared = 0
        self.num_equal = 0

    def answer(self, plan: StepPlan, predictions: Predictions) -> Predictions:
        found = self._other.forward(plan)
        is_equal_T = (found.token_T == predictions.token_T) & plan.is_read_T
        self.num_compared += int(plan.is_read_T.sum())
        self.num_equal += int(is_equal_T.sum())
        return predictions

    def commit(self, plan: StepPlan, winner_row_of_request: Int) -> None:
        super().commit(plan, winner_row_of_request)
        self._other.commit(plan, winner_row_of_request)


@dataclass(frozen=True, slots=True)
class Comparison:
    """num_equal of num_compared predicted tokens; the metrics of both models' runs."""

    num_equal: int
    num_compared: int
    plain: dict[str, Any]
    quantized: dict[str, Any]

    @property
    def agreement(self) -> float:
        return self.num_equal / self.num_compared if self.num_compared else 1.0

    def table(self) -> str:
        rows = [[name, *_cells(own)] for name, own in (("float", self.plain), ("quantized", self.quantized))]
        agreement = (
            f"The same token at {100 * self.agreement:.2f} % of {self.num_compared} predictions "
            "(every one that the float model's decoding read)."
        )
        return agreement + "\n\n" + markdown(["model", "accuracy", "TPF effective", "steps", "requests"], rows)

    def as_dict(self) -> dict[str, Any]:
        return {"agreement": self.agreement, **asdict(self)}


def compare_models(profile: DeviceProfile, plain: RunConfig, quantized: RunConfig) -> Comparison:
    """Both models are loaded at once. Raises ConfigError, MissingCapability or EngineError."""
    assert plain.input is not None, "checked before anything is quantized"
    plain_profile = profile.model_copy(update={"quantization": None})
    quantized_profile = profile.model_copy(update={"quantization": "w8a8"})
    with (
        tempfile.TemporaryDirectory() as folder,
        build_generator(plain_profile, plain) as first,
        build_generator(quantized_profile, quantized) as second,
    ):
        # One copy for both: a file that is rewritten in the meantime would have them solve different problems.
        problems = shutil.copy(plain.input.path, Path(folder) / "problems.jsonl")
        source = plain.input.model_copy(update={"path": str(problems)})
        paired = PairedEngine(first.engine, second.engine)
        beside = Generator(plain_profile, first.run, paired, first.tokenizer, first.model_config)
        metrics = [
            _run(generator, source, Path(folder) / name)
            for name, generator in (("float.jsonl", beside), ("quantized.jsonl", second.with_decode(first.run.decode)))
        ]
    return Comparison(paired.num_equal, paired.num_compared, *metrics)


def _run(generator: Generator, source: InputConfig, output: Path) -> dict[str, Any]:
    run = generator.run.model_copy(update={"input": source, "output": OutputConfig(path=str(output))})
    metrics = run_batch(generator.profile, run, lambda: generator)
    assert metrics is not None, "one process writes the metrics"
    return metrics


def _cells(metrics: dict[str, Any]) -> list[str]:
    tpf, steps = metrics["tpf"]["effective"]["per_request_mean"], metrics["steps"]["mean"]
    return [accuracy(metrics), number(tpf), number(steps, 1), str(metrics["requests"]["finished"])]
