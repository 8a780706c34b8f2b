import pytest
import torch

from lineartime.finetuning.answering import best_answers, best_span
from lineartime.finetuning.questions import Question
from lineartime.hf import LineartimeConfig, LineartimeForQuestionAnswering

from .test_windows import TEXT, encoder


@pytest.mark.parametrize("longest", [1, 3, 20])
def test_the_best_span_is_the_best_of_all(longest: int) -> None:
    for seed in range(20):
        start, end = torch.randn(2, 9, generator=torch.Generator().manual_seed(seed))
        spans = [(i, j) for i in range(9) for j in range(i, min(i + longest, 9))]
        best = max(spans, key=lambda span: float(start[span[0]] + end[span[1]]))
        score, *places = best_span(start, end, longest)
        assert tuple(places) == best
        assert score == pytest.approx(float(start[best[0]] + end[best[1]]))
    assert best_span(torch.zeros(0), torch.zeros(0), longest)[1:] == (-1, -1)


def test_answers_do_not_depend_on_the_batch_and_documents_compete() -> None:
    torch.manual_seed(0)
    config = LineartimeConfig.from_preset("flash-tiny", "mlm", vocab_size=258, d_model=16, n_blocks=2, d_qk=8, chunk_size=16)
    model = LineartimeForQuestionAnswering(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    questions = [
        Question("a", "was?", TEXT),
        Question("b", "wo?", "kurz"),
        Question("a", "was?", TEXT[40:]),
        Question("c", "?", ""),
    ]
    windows = list(encoder().for_answering(questions))
    found = [best_answers(model, windows, questions, 12, size) for size in (1, 5)]
    assert list(found[0]) == ["a", "b", "c"]
    for key, answer in found[0].items():
        assert found[1][key].text == answer.text
        assert found[1][key].score == pytest.approx(answer.score, abs=1e-5)
    first_windows = [each for each in windows if each["question"] == 0]
    of_windows = [best_answers(model, [each], questions[:1], 12, 1)["a"] for each in first_windows]
    first = best_answers(model, first_windows, questions[:1], 12, 4)["a"]
    assert len(of_windows) > 2
    assert first.score == pytest.approx(max(each.score for each in of_windows), abs=1e-5)
    alone = [
        best_answers(model, list(encoder().for_answering([each])), [each], 12, 4)["a"] for each in (questions[0], questions[2])
    ]
    assert found[0]["a"].score == pytest.approx(max(each.score for each in alone), abs=1e-5)
    assert found[0]["c"] == type(alone[0])("", float("-inf"))
