import math

import torch

from lineartime.ops.activations import attention_weights


def weights(products: list[float], activation: str, visible: list[bool] | None = None) -> list[float]:
    row = attention_weights(
        torch.tensor([products], dtype=torch.float64),
        d_qk=4,
        visible=None if visible is None else torch.tensor([visible]),
        bias=None,
        activation=activation,  # type: ignore[arg-type]
        published_length=None,
    )
    return row[0].tolist()


def test_relu2_by_hand() -> None:
    assert weights([4.0, -4.0], "relu2") == [2.0, 0.0]  # (4 / sqrt 4)^2 / 2 keys
    assert weights([4.0, 9.0], "relu2", [True, False]) == [4.0, 0.0]  # of which one is visible


def test_softmax_sums_to_one_over_visible_keys_and_not_at_all_where_there_are_none() -> None:
    assert math.isclose(sum(weights([1.0, 2.0, 3.0], "softmax", [True, True, False])), 1.0)
    assert weights([1.0, 2.0], "softmax", [False, False]) == [0.0, 0.0]
    assert weights([1.0, 2.0], "relu2", [False, False]) == [0.0, 0.0]
