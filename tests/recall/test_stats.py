from __future__ import annotations

import random

import pytest

from sparsekv.bench.recall.stats import Share, paired_loss


def test_wilson_interval_of_31_of_32() -> None:
    low, high = Share(31, 32).interval
    assert (low, high) == pytest.approx((0.8426, 0.9945), abs=1e-4)
    assert Share(0, 0).interval == (0.0, 1.0)
    assert Share(10, 10).interval[1] == pytest.approx(1.0)


def test_loss_counts_and_covers_the_truth() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(60):
        contexts = [str(i // 4) for i in range(200)]
        reference = [rng.random() < 0.9 for _ in contexts]
        arm = [right and rng.random() > 0.1 for right in reference]
        loss = paired_loss(reference, arm, contexts)
        covered += loss.low <= 0.09 <= loss.high
        assert loss.better == 0
        assert loss.mean == pytest.approx(loss.worse / 200)
    assert covered >= 50


def test_questions_of_one_context_are_not_independent() -> None:
    # Everything of two contexts is lost: as 10 single questions that would look certain, as 2 of 20 contexts it is not.
    contexts = [str(i // 5) for i in range(100)]
    arm = [i >= 10 for i in range(100)]
    together = paired_loss([True] * 100, arm, contexts)
    apart = paired_loss([True] * 100, arm, [str(i) for i in range(100)])
    assert together.high > apart.high
    assert together.low < apart.low


def test_no_difference_is_not_certainty() -> None:
    loss = paired_loss([True] * 30, [True] * 30, [str(i // 3) for i in range(30)])
    assert (loss.mean, loss.low, loss.high) == (0.0, -0.3, 0.3)
    assert loss.p_value == 1.0


def test_mcnemar() -> None:
    loss = paired_loss([True] * 6 + [False], [False] * 6 + [True], list("abcdefg"))
    assert loss.p_value == pytest.approx(2 * (1 + 7) / 128)
    with pytest.raises(ValueError, match="same questions"):
        paired_loss([True], [], [])
