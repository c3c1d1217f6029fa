"""Weighted neighbours against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from pycls_fast.train.knn import knn_votes, places


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (20, 1.0), (200, 0.3)])
def test_equals_scikit_learn(k: int, temperature: float) -> None:
    generator = np.random.RandomState(k)
    labels = generator.randint(0, 6, 200)
    centres = generator.randn(6, 12)
    memory = (centres[labels] + 2 * generator.randn(200, 12)) * generator.uniform(0.1, 10, (200, 1))
    # More than one chunk.
    features = 2 * generator.randn(1500, 12)
    reference = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / temperature)
    ).fit(memory, labels)
    votes = knn_votes(
        torch.from_numpy(features), torch.from_numpy(memory), torch.from_numpy(labels),
        classes=6, k=k, temperature=temperature,
    )  # fmt: skip
    assert votes.dtype == torch.float64
    shares = votes / votes.sum(dim=1, keepdim=True)
    np.testing.assert_allclose(shares.numpy(), reference.predict_proba(features), rtol=1e-9, atol=1e-12)
    assert (votes.argmax(dim=1).numpy() == reference.predict(features)).all()


def test_places_count_the_classes_ahead() -> None:
    votes = torch.tensor([[3.0, 2.0, 2.0, 0.0], [0.0, 5.0, 5.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    for label, expected in ((0, [0, 4, 0]), (1, [1, 0, 4]), (2, [2, 1, 4]), (3, [4, 2, 4])):
        assert places(votes, torch.full((3,), label)).tolist() == expected
