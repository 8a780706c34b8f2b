import inspect

from lineartime.data import tokenizers
from lineartime.evaluation import perplexity
from lineartime.evaluation.perplexity import is_prose

BOOK = """"Well," said the Doctor's boy--who never was late--"it's half-past four; I _must_ go (he went)." In 1862, Mr. Müller
answered: Ja, das weiß ich! """
TOKENIZED = "The film , which was released on 4 July , was a success ; critics ( most of them ) praised its cast and music ."
DATA = '{"step": 1, "loss": 2.0, "seconds": 12.5}\n' * 20


def test_books_are_prose_and_code_and_data_are_not() -> None:
    assert is_prose(BOOK)
    assert is_prose(TOKENIZED)
    assert not is_prose(inspect.getsource(tokenizers))
    assert not is_prose(inspect.getsource(perplexity))  # with its docstring
    assert not any(map(is_prose, (DATA, "", "  \n ", "-- ... --", "1 2 3")))
