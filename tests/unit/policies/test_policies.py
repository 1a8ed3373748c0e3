"""Policies decide by what they are given, are found by name, and come from other packages too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from rules_that_ship import choose, count, score, settings_of

from common.config import DecodeConfig
from common.decoding.scheduling.state import Branch
from common.errors import ConfigError
from common.policies import Draws, Filling, Scoring, Stepped, shipped
from common.policies.checked import checked
from common.policies.spawn_rules import Open, num_guarded, rank

DRAWS = Draws(7, 3, 0)
ANCHOR = Branch()


def decode(**settings: Any) -> DecodeConfig:
    return DecodeConfig(skip_threshold=0.8, num_lookahead=2, **settings)


def scoring(token_BW: list[list[int]], probability_BW: list[list[float]], tried: list[tuple[int, int]]) -> Scoring:
    """tried: column and token of each lookahead; the window begins at position 10. A confidence is p - 1."""
    probability = np.array(probability_BW)
    values_3BW = np.stack((np.array(token_BW), probability, probability - 1)).astype(np.float32)
    is_masked_BW = np.ones(probability.shape, dtype=np.bool_)
    for branch, (column, _) in enumerate(tried):
        is_masked_BW[branch, column] = False
    branches = [*(Branch(((10 + column, token),), 0.5) for column, token in tried), ANCHOR]
    return Scoring(values_3BW, is_masked_BW, branches, 10, decode(), DRAWS)


# Two lookaheads, at columns 0 and 1, and the anchor. The first makes one mask sure, the second two. The anchor still
# predicts the first's token, with 0.5, and no longer the second's.
THREE = scoring(
    [[5, 1, 2, 3], [1, 6, 2, 3], [5, 7, 2, 3]],
    [[0.1, 0.7, 0.9, 0.7], [0.2, 0.1, 0.9, 0.9], [0.5, 0.4, 0.6, 0.6]],
    [(0, 5), (1, 6)],
)


@pytest.mark.parametrize(
    ("name", "winner"),
    [
        ("mean", 0),  # 0.77, 0.67, 0.53
        ("num_sure", 1),
        ("num_sure(soon=0.1)", 0),  # 0.86 + 1 + 0.86 beside 0.14 + 1 + 1
        ("expected", 0),  # (1 + 1) 0.5, nothing, 0
        ("expected(trust=3)", 2),  # 2 / 8 and a tie break below the anchor's
        ("hedged", 0),  # 1 + 1 - 2 / 2 and 2 + 1 - 2: of equal ones the one of the higher mean
        ("hedged(risk=1)", 1),  # 2 + 1 - 1 beside 1 + 1 - 1 / 2
        ("hedged(risk=3)", 0),  # 1 + 1 - 3 / 2 beside 2 + 1 - 3
        ("hedged(risk=5)", 2),
        ("anchor", 2),
        ("lookahead", 0),
    ],
)
def test_branch_scores(name: str, winner: int) -> None:
    score_B = score(name, THREE)
    assert int(score_B.argmax()) == winner


@pytest.mark.parametrize("name", shipped("branch_scores"))
def test_a_branch_without_masks_and_one_without_lookaheads_have_scores(name: str) -> None:
    full = THREE._replace(is_masked_BW=np.zeros_like(THREE.is_masked_BW))
    alone = scoring([[1, 2]], [[0.5, 0.9]], [])
    for given in (full, alone):
        assert np.isfinite(score(name, given)).all()


def test_a_draft_is_agreed_on_where_each_of_its_tokens_is_predicted_without_it() -> None:
    """The anchor predicts the first token, the first draft the second, the second draft another third one."""
    token_BW = [[5, 6, 2, 3], [5, 6, 2, 9], [5, 6, 7, 3], [5, 1, 2, 3]]
    nested = [((10, 5),), ((10, 5), (11, 6)), ((10, 5), (11, 6), (12, 8))]
    given = scoring(token_BW, [[0.5] * 4] * 4, [])._replace(branches=[*(Branch(fills) for fills in nested), ANCHOR])
    assert given.is_agreed_B.tolist() == [True, True, False, True]
    assert score("agreement", given).tolist() == [1.0, 2.0, -1.0, 0.0]


def ranked(name: str, probability: Any, *mass_and_spread: Any) -> Any:
    probability_C, order_C = np.array(probability, dtype=np.float32), np.zeros(len(probability), np.int64)
    rank_C, draw_C = np.zeros(len(order_C)), DRAWS.generator().random(len(order_C))
    mass_C, spread_C = mass_and_spread or (rank_C, rank_C)
    masks = Open(probability_C, probability_C - 1, mass_C, spread_C, draw_C, order_C)
    rank(masks, settings_of(decode(), spawn_rule=name), rank_C)
    return rank_C


def spawned(name: str, probability: list[float]) -> list[int]:
    return np.argsort(-ranked(name, probability), kind="stable")[:2].tolist()


@pytest.mark.parametrize(
    ("name", "tried"),
    [
        ("confident", [3, 1]),
        ("uncertain", [2, 0]),
        ("nested", [3, 1]),
        ("spread", [3, 2]),
        ("near", [1, 0]),
        ("near(probability=0.2)", [2, 0]),
        ("mixed(share=1)", [3, 1]),
    ],
)
def test_spawn_rules(name: str, tried: list[int]) -> None:
    assert spawned(name, [0.4, 0.7, 0.1, 0.9]) == tried


@pytest.mark.parametrize(("bound", "count"), [(0, 1), (0.29, 1), (0.31, 2), (1.1, 2), (1.3, 3), (9, 4)])
def test_lookaheads_go_where_the_masks_to_the_left_are_settled_enough(bound: float, count: int) -> None:
    assert num_guarded(np.array([-0.3, -0.9, -0.2, -0.1], np.float32), bound) == count


def test_frechet_fills_while_all_are_likely_right_together() -> None:
    # Sorted 0.95, 0.9, 0.8, 0.5: bounds 0.90, 0.75, 0.45, -0.35.
    values_3BM = np.array([[[1, 2, 3, 4]], [[0.8, 0.95, 0.5, 0.9]], [[0, 0, 0, 0]]], np.float32)
    for delta, filled in ((0.25, [0, 1, 3]), (0.5, [1, 3]), (0.89, [1]), (0.99, [1])):
        assert choose(f"frechet(delta={delta})", Filling(values_3BM, 0, 1, decode())) == filled


def test_mixed_takes_its_share_of_the_most_confident_and_draws_the_rest() -> None:
    probability = np.linspace(0, 1, 200).tolist()
    assert spawned("mixed", probability)[0] == 199
    assert spawned("mixed", probability)[1] != 198
    assert spawned("random", probability) == spawned("random", probability), "every rank draws the same"


@pytest.mark.parametrize(("name", "filled"), [("agreed", [0]), ("agreed(share=0.6)", [0, 2]), ("threshold", [0, 1, 2])])
def test_fill_rules_that_look_at_other_branches(name: str, filled: list[int]) -> None:
    token_BM = np.array([[1, 2, 3, 4], [1, 9, 3, 4], [1, 8, 7, 4]])
    probability_BM = np.full((3, 4), [0.9, 0.95, 0.99, 0.5])
    values_3BM = np.stack((token_BM, probability_BM, probability_BM - 1)).astype(np.float32)
    assert choose(name, Filling(values_3BM, 0, 1, decode())) == filled


def test_a_step_that_filled_much_is_followed_by_fewer_lookaheads() -> None:
    settings = DecodeConfig(num_lookahead=7)
    rule = "stalled(plenty=5, share=0.3)"
    assert [count(rule, Stepped(filled, 20, settings)) for filled in (0, 4, 5)] == [7, 7, 2]
    assert count("all", Stepped(9, 20, settings)) == 7


def test_lookaheads_whose_scores_agree_are_followed_by_none() -> None:
    settings = DecodeConfig(num_lookahead=7)
    stepped = [Stepped(1, 20, settings, variance) for variance in (0.4, 0.5, np.inf)]
    assert [count("disputed(variance=0.5)", each) for each in stepped] == [0, 7, 7]


def test_a_pivot_is_the_mask_most_open_between_few_tokens() -> None:
    """Both tokens of the masks: 0.9 and 0.05; 0.5 and 0.4; 0.3 and 0.2, which are too little together."""
    share_2C = np.array([[0.9, 0.5, 0.3], [0.05, 0.4, 0.2]])
    of_both = share_2C[0], share_2C.sum(axis=0), -(share_2C * np.log(share_2C)).sum(axis=0)
    rank_C = ranked("pivot(tokens=2, mass=0.7)", *of_both)
    assert rank_C.argmax() == 1 and rank_C[2] == -1
    assert (ranked("pivot(tokens=2, mass=0.96)", *of_both) == -1).all()


def test_ripple_weighs_what_is_left_with_how_likely_the_token_is() -> None:
    """Masks that no lookahead of THREE fills: columns 2 and 3."""
    score_B = score("ripple(trust=0.5)", THREE)
    assert score_B[0] == pytest.approx(-0.2 + 0.5 * np.log(0.5))
    assert score_B[1] < -30 and score_B[2] == pytest.approx(-0.4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"branch_score": "best"}, "set it to one of agreement, anchor"),
        ({"branch_score": "num_sure(early=1)"}, r"num_sure takes soon, created, as in num_sure\(soon=1\)"),
        ({"branch_score": "num_sure(soon=much)"}, "num_sure takes soon"),
        ({"branch_score": "mean(a=1)"}, "mean takes bottom_share, created, as in mean"),
        ({"fill_rule": "threshold(a=1)"}, "threshold takes no numbers"),
        ({"spawn_rule": "os.system"}, "set it to one of confident"),
        ({"lookahead_rule": ""}, "set it to one of all, disputed"),
    ],
)
def test_an_unknown_one_is_refused_in_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        DecodeConfig(**settings)


PLUG_IN = """
import numpy as np

def score(scoring, *, slope=1.0):
    return slope * np.arange(len(scoring.branches), dtype=np.float64)

def strict(scoring, *, must):
    return must * np.ones(len(scoring.branches))
"""


def with_package(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program where the plug-in is known by entry points, as pip would install it."""
    (tmp_path / "last_one.py").write_text(PLUG_IN)
    info = tmp_path / "last_one-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: last-one\nVersion: 1.0\n")
    points = "last_one = last_one:score\nstrict = last_one:strict\nmean = last_one:score\n"
    (info / "entry_points.txt").write_text(f"[lopa.branch_scores]\n{points}")
    root = Path(__file__).parents[3]
    environment = {"PYTHONPATH": f"{tmp_path}:{root}"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)


def test_a_package_of_ones_own_adds_one(tmp_path: Path) -> None:
    done = with_package(
        tmp_path,
        "from common.config import DecodeConfig; from common.policies import policy\n"
        "decode = DecodeConfig(branch_score='last_one(slope=2)')\n"
        "class Given: branches = [1, 2, 3]\n"
        "print(policy('branch_scores', decode.branch_score)(Given).tolist())",
    )
    assert done.stdout.strip() == "[0.0, 2.0, 4.0]", done.stderr


def test_a_package_cannot_replace_one_that_ships_unseen(tmp_path: Path) -> None:
    done = with_package(
        tmp_path, "from common.policies import check, origins\ncheck('branch_scores', 'mean'); print(sorted(origins()))"
    )
    assert done.stdout.strip() == "['branch_scores.last_one', 'branch_scores.strict']", done.stderr
    assert "branch_scores mean of another package is not used" in done.stderr


def test_a_number_without_a_default_has_to_be_given(tmp_path: Path) -> None:
    done = with_package(
        tmp_path,
        "from common.policies import policy\n"
        "policy('branch_scores', 'strict(must=2)')\n"
        "try: policy('branch_scores', 'strict')\n"
        "except ValueError as error: print(error)",
    )
    assert done.stdout.strip() == "strict needs must, as in strict(must=1)", done.stderr


@pytest.mark.parametrize("numbers", ["share=1e400", "share=nan", "share=1, share=2"])
def test_numbers_are_finite_and_given_once(numbers: str) -> None:
    with pytest.raises(ValidationError, match="stalled takes plenty, share"):
        DecodeConfig(lookahead_rule=f"stalled({numbers})")


@pytest.mark.parametrize(("share", "tried"), [(-5, 0), (9, 2)])
def test_no_rule_tries_more_lookaheads_than_there_are_or_less_than_none(share: int, tried: int) -> None:
    stepped = Stepped(num_filled=4, num_masked=9, settings=decode())
    assert count(f"stalled(share={share})", stepped) == tried


FILLING = Filling(THREE.values_3BW, 0, 1, decode())


@pytest.mark.parametrize(
    ("folder", "given", "decide", "reason"),
    [
        ("lookahead_rules", Stepped(4, 9, decode()), lambda given: 0.5, "TypeError"),
        ("lookahead_rules", Stepped(4, 9, decode()), lambda given: given.nosuch, "AttributeError"),
        ("branch_scores", THREE, lambda given: given.probability_BW, r"shape \(3, 4\) where .* \(3,\)"),
        ("branch_scores", THREE, lambda given: [1.0, 2.0, 3.0], "returned list"),
        ("fill_rules", FILLING, lambda given: given.probability_M, "returned float32"),
        ("fill_rules", FILLING, lambda given: given.probability_M > 2, "chose no mask"),
    ],
)
def test_a_policy_that_fails_is_named_in_a_sentence(folder: str, given: Any, decide: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"decode.{folder[:-1]}: mine: the policy failed .*{reason}"):
        checked(folder, "mine", decide)(given)
