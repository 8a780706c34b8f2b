import pytest

from lineartime.finetuning.answer_metrics import Metric, answer_scores, score_answers

# What the official scripts give: (exact match, F1).
OFFICIAL: list[tuple[Metric, str, list[str], tuple[float, float]]] = [
    ("squad", "The U.S.", ["US", "America"], (1, 1)),
    ("triviaqa", "The U.S.", ["US", "America"], (0, 0)),
    ("triviaqa", "The U.S.", ["u s"], (1, 1)),
    ("squad", "well-known", ["well known"], (0, 0)),
    ("triviaqa", "well-known", ["well known"], (1, 1)),
    ("triviaqa", "Park_Grove ‘School’", ["park grove school"], (1, 1)),  # noqa: RUF001
    ("squad", "a cat sat down", ["the cat sat"], (0, 0.8)),
    ("squad", "cat cat", ["cat"], (0, 2 / 3)),
    ("squad", "the", [""], (1, 0)),
    ("squad_v2", "the", [], (1, 1)),
    ("squad_v2", "a cat", [], (0, 0)),
    ("squad_v2", "", ["cat"], (0, 0)),
    ("squad_v2", "cat", ["the", "cat"], (1, 1)),
    ("cmrc", "《光荣》和ω-force。", ["光荣和ω-force"], (1, 1)),
    ("cmrc", "公司光荣和", ["光荣和别"], (0, 2 * 3 / 9)),
    ("cmrc", "1998年10月", ["10月"], (0, 2 * 2 / 6)),
]


@pytest.mark.parametrize(("metric", "prediction", "right", "scores"), OFFICIAL)
def test_answers_score_as_the_official_scripts_score_them(
    metric: Metric, prediction: str, right: list[str], scores: tuple[float, float]
) -> None:
    assert answer_scores(prediction, right, metric) == pytest.approx(scores)


def test_a_question_without_a_prediction_scores_zero() -> None:
    found = score_answers({"a": "cat", "other": "x"}, {"a": ["cat"], "b": ["dog"]}, "squad")
    assert (found.exact_match, found.f1, found.questions, found.missing) == (50, 50, 2, 1)
